"""ZeroTrainer beside Transformers' own Trainer (DDP): the same losses, norms and weights;
saving, resuming, evaluation, generation.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import ROOT, on_ranks, spawn_ranks

pytest.importorskip("transformers")


def _launched(script: str, folder: Path, *words: str, world: int = 2) -> dict[str, Any]:
    """Start a script of tests/support on `world` ranks, and return rank 0's results."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(world)]
    command += [str(ROOT / "tests" / "support" / script), str(folder), str(results), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    answer: dict[str, Any] = json.loads(results.read_text())
    return answer


def _trained(rank: int, world: int, folder: str) -> dict[str, Any]:
    from tests.support import trainer_features, trainer_runs

    names = ["ragged", "half", "best", "adapter", "grouped", "sequences", "handed on", "adafactor"]
    features = trainer_features.run(Path(folder, "features"), names)
    return {"results": trainer_runs.run(Path(folder, "runs")), "features": features}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All quick runs in one pair of processes, which import Transformers once."""
    first, second = spawn_ranks(2, _trained, str(tmp_path_factory.mktemp("trainer")), timeout=240)
    assert first.error is None and second.error is None, (first.stderr + second.stderr)[-6000:]
    # as they would be in a file: tuples are lists
    answer: dict[str, Any] = json.loads(json.dumps(first.result))
    return answer


@pytest.fixture
def results(trained: dict[str, Any]) -> Any:
    return trained["results"]


@pytest.fixture
def features(trained: dict[str, Any]) -> Any:
    return trained["features"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_trains_as_the_trainer_does_with_ddp(
    results: dict[str, Any], stage: int
) -> None:
    plain, ours = results["runs"]["plain"], results["runs"][f"stage{stage}"]
    assert ours["policy"] == f"zero{stage}"
    # stages 2 and 3 sum a micro-batch over the ranks before they add it to the others
    same = plain["losses"] if stage == 1 else pytest.approx(plain["losses"], rel=1e-6)
    assert ours["losses"] == same and len(ours["losses"]) == 6
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert ours["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-4)
    if ours["before"] is not None:
        assert ours["before"] > ours["evaluated"], "evaluation before training runs the plain model"


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(results: dict[str, Any]) -> None:
    halves = results["runs"]["halves"]
    assert halves["same as"] == ["constant", True]
    whole = results["runs"]["constant"]
    assert halves["losses"][-3:] == whole["losses"][-3:]
    assert halves["rates"] == whole["rates"] and len(set(whole["rates"])) == 6, (
        "the schedule goes on where it was"
    )


def test_a_deepspeed_file_decides_stage_and_precision(results: dict[str, Any]) -> None:
    run = results["runs"]["whole bf16"]
    assert run["policy"] == "zero3" and run["dtype"] == "torch.bfloat16"
    assert 0.3 < run["fraction"] < 0.7


def test_contradictions_between_file_and_arguments_are_named(results: dict[str, Any]) -> None:
    fp16, bf16, clip, batch, key = results["refused"]
    assert "args.fp16 is on" in fp16 and "args.bf16 is on" in bf16
    assert (
        "gradient_clipping=0.7 in the configuration contradicts the training arguments, which"
        " say 0.5" in clip
    )
    assert (
        "train_micro_batch_size_per_gpu=7" in batch
        and "DeepSpeed's zero_optimization.overlap_com=True is not a key of DeepSpeed's" in key
    )


def test_fp16_scales_losses_and_the_schedule_waits_for_skipped_steps(
    results: dict[str, Any],
) -> None:
    run = results["runs"]["fp16"]
    assert run["dtype"] == "torch.float16" and run["policy"] == "zero2" and run["skipped"] == 1
    assert run["losses"][0] == pytest.approx(results["runs"]["plain"]["losses"][0], abs=1e-3)
    assert run["losses"][-1] < run["losses"][0]
    # Adam hides a factor in the gradients; their norms do not: micro-batches are averaged, and the
    # loss scale is divided out before the norm is taken.
    assert run["norms"][:2] == pytest.approx(results["runs"]["plain"]["norms"][:2], rel=0.02)
    rates = run["rates"]
    assert len(rates) == 12 and [n for n in range(1, 12) if rates[n] == rates[n - 1]] == [3]


def test_what_a_checkpoint_lacks_is_said(results: dict[str, Any]) -> None:
    plain, weights, samples = results["lacks"]
    assert "was saved by a Trainer that does not shard" in plain
    assert "holds weights alone: optimizer and schedule begin anew" in weights
    assert "a step took 8 samples in" in samples and "takes 16 now" in samples


def _same(ours: Any, plain: Any) -> bool:
    """Whether two trees of numbers are the same but for the last bits of a norm."""
    if isinstance(plain, dict):
        return ours.keys() == plain.keys() and all(_same(ours[key], plain[key]) for key in plain)
    if isinstance(plain, list):
        return len(ours) == len(plain) and all(map(_same, ours, plain))
    return bool(ours == (pytest.approx(plain, rel=2e-5) if isinstance(plain, float) else plain))


@pytest.mark.parametrize("name", ["ragged", "sequences", "handed on", "adafactor"])
def test_a_feature_of_the_trainer_gives_the_numbers_that_it_gives_with_ddp(
    features: dict[str, Any], name: str
) -> None:
    """Smoothed labels of uneven number, max_grad_norm=0 and gradient checkpointing; a subclass that
    predicts by generating; a second trainer on the model of a first; Adafactor.
    """
    assert _same(features[name]["ours"], features[name]["plain"]), features[name]


def test_args_fp16_is_the_configurations_fp16(features: dict[str, Any]) -> None:
    run = features["half"]
    assert run["ours"] == run["plain"] and run["ours"]["dtype"] == "torch.float16"


def test_the_best_model_is_loaded_at_the_end_and_its_checkpoint_kept(
    features: dict[str, Any],
) -> None:
    run, plain = features["best"]["ours"], features["best"]["plain"]
    assert run["evaluated"] == run["best"] and run["step"] < 6
    assert _same(run, plain), run
    assert run["kept"] == [f"checkpoint-{run['step']}"]
    assert "model.safetensors" in run["files"] and "zeroshard" not in run["files"]
    assert run["tensors"] == 20, "the tied head is saved once"


def test_an_adapter_is_saved_alone_and_resumed(features: dict[str, Any]) -> None:
    run, plain = features["adapter"]["ours"], features["adapter"]["plain"]
    assert run["halves 6"] == run["lora 6"]
    # weights twice, masters and two moments of the adapter, and no base
    assert run.pop("bytes") < 8 * plain.pop("bytes") < run["base bytes"]
    assert _same(run, plain), run


def test_a_resumed_run_takes_the_samples_that_the_trainers_own_generators_order(
    features: dict[str, Any],
) -> None:
    run, plain = features["grouped"]["ours"], features["grouped"]["plain"]
    assert run["resumed"] == run["whole"], "the losses of before the resume are in its log"
    assert _same(run, plain), (run, plain)


@pytest.mark.slow
def test_every_stage_and_tier_generates_and_predicts_as_ddp_does(tmp_path: Path) -> None:
    names = ["stage1", "stage2", "stage3", "stage3 on host", "mean", "twice"]
    for name, run in _launched("trainer_features.py", tmp_path, *names).items():
        assert _same(run["ours"], run["plain"]), (name, run)


@pytest.mark.slow
def test_a_run_goes_on_over_two_ranks_one_and_three(tmp_path: Path) -> None:
    """Each at another stage; the data goes on where it was, since a step takes as many samples."""
    plain = _launched("trainer_features.py", tmp_path, "plain 6")["plain"]
    for world, steps in ((2, 2), (1, 4), (3, 6)):
        run = _launched("trainer_features.py", tmp_path, f"ours {steps}", world=world)["ours"]
    assert _same(run, plain), (run, plain)
    states = tmp_path / "ours" / "moves" / "checkpoint-6"
    assert len(list(states.glob("rng_state_*.pth"))) == 3


def test_what_the_training_loop_holds_answers_for_the_model() -> None:
    """TRL's trainers ask it for ``is_gradient_checkpointing``, ``config`` and methods of the
    model's.
    """
    import torch

    import zeroshard as zs
    from zeroshard.integrations.transformers import _Wrapped

    class Model(torch.nn.Linear):
        is_gradient_checkpointing = False

        def generate(self) -> str:
            return "text"

    model = Model(2, 2)
    engine = zs.shard(model)
    wrapped = _Wrapped(model, engine)
    assert (
        wrapped.is_gradient_checkpointing is False
        and wrapped.generate() == "text"
        and wrapped.module is model
    )
    with pytest.raises(AttributeError, match="config"):
        wrapped.config  # noqa: B018
    engine.close()


@pytest.mark.parametrize(
    "name", ["fsdp", "deepspeed", "torch_compile", "auto_find_batch_size", "bf16_full_eval"]
)
def test_arguments_that_cannot_act_on_a_sharded_model_are_refused_by_name(name: str) -> None:
    from types import SimpleNamespace

    import zeroshard as zs
    from zeroshard.integrations.transformers import _completed

    with pytest.raises(zs.ConfigError, match=rf"args.{name} has no effect under ZeroTrainer"):
        _completed(zs.Config(), SimpleNamespace(fp16=False, bf16=False, **{name: "full_shard"}))


def test_batch_shares_are_refused_where_the_trainer_cuts_the_batches() -> None:
    from types import SimpleNamespace

    import zeroshard as zs
    from zeroshard.integrations.transformers import _completed

    with pytest.raises(zs.ConfigError, match="batch_shares has no place in ZeroTrainer"):
        _completed(zs.Config(batch_shares=[0.5, 0.5]), SimpleNamespace(fp16=False, bf16=False))


_ADAMW = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


def _compared(source: dict[str, Any]) -> None:
    from types import SimpleNamespace

    from zeroshard.integrations.transformers import _read

    own = {"optim": "adamw_torch", "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999}
    own |= {"adam_epsilon": 1e-8, "weight_decay": 0.0, "warmup_steps": 0, "max_steps": -1}
    arguments = SimpleNamespace(**own, lr_scheduler_type="linear")
    assert _read(source, arguments).gradient_clipping is None, "which the arguments say"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": _ADAMW | {"lr": 1e-3}}}, "params.lr=0.001 in"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}, "say .0.9, 0.999."),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode=False"),
        ({"optimizer": {"type": "Lion", "params": {}}}, "optimizer.type='lion'"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}}, "steps=9"),
    ],
)
def test_what_the_file_says_of_the_optimizer_is_that_of_the_arguments_or_named(
    source: dict[str, Any], message: str
) -> None:
    import zeroshard as zs

    with pytest.raises(zs.ConfigError, match=rf"{message}.*make them agree, or use 'auto'"):
        _compared(source)


def test_a_schedule_of_another_kind_is_told(caplog: pytest.LogCaptureFixture) -> None:
    auto = {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    _compared({"scheduler": {"type": "WarmupDecayLR", "params": auto}})
    _compared({"optimizer": {"type": "AdamW", "params": _ADAMW}})
    assert not caplog.records, "these agree"
    _compared({"scheduler": {"type": "WarmupLR", "params": auto}})
    assert "scheduler.type='WarmupLR' of the configuration is not used" in caplog.text


@on_ranks(2)
def test_weights_that_evaluation_rescales_are_written_back() -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "attention_hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
    }
    config = RwkvConfig(vocab_size=50, context_length=16, rescale_every=1, use_cache=False, **sizes)
    tokens = torch.arange(16).view(2, 8)

    def run(stage: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = RwkvForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = None if stage is None else zs.shard(model, optimizer, stage=stage)
        losses = []
        for _ in range(2):
            loss = model.train()(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with (
                torch.no_grad(),
                nullcontext() if engine is None else engine.gathered(writeback=True),
            ):
                losses += [loss.item(), model.eval()(tokens, labels=tokens).loss.item()]
                model.train()(tokens)
        if engine is None:
            return losses, model.state_dict()
        state = engine.full_state_dict(rank0_only=False)
        if stage == 3:
            with (
                torch.no_grad(),
                pytest.raises(
                    zs.StateError,
                    match=(
                        r"writeback=True\) \(a model that rescales its own weights: around the"
                        r" evaluation"
                    ),
                ),
            ):
                model.eval()(tokens)
            engine.reset()
        engine.close()
        return losses, state

    losses, state = run(None)
    for stage in range(4):
        sharded, found = run(stage)
        assert sharded == losses and all(
            torch.equal(found[name], value) for name, value in state.items()
        ), stage


# ------------------------------------------------------------------------------------------ leaves


@pytest.fixture(scope="module")
def with_leaves(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank of 3, 2 and 1 has seen of runs with leaves."""
    folder, out = str(tmp_path_factory.mktemp("leaves")), {}
    for world in (3, 2, 1):  # each resumes from what the one before has saved
        found = spawn_ranks(world, _with_leaves, folder, timeout=240)
        assert all(one.error is None for one in found), found[0].stderr[-6000:]
        out[world] = [one.result for one in found]
    return out


def _with_leaves(rank: int, world: int, folder: str) -> dict[str, Any]:
    from tests.support import trainer_leaves

    return trainer_leaves.run(rank, world, folder)


@pytest.mark.parametrize("name", ["even", "uneven", "mean", "fp16"])
def test_leaves_train_to_one_hash_on_any_number_of_ranks(
    with_leaves: dict[int, list[dict[str, Any]]], name: str
) -> None:
    """With dropout, clipping, a schedule, labels of uneven number that a collator draws, and leaves
    that the ranks do not divide.
    """
    runs = {world: ranks[0][name] for world, ranks in with_leaves.items()}
    assert len({run["hash"] for run in runs.values()}) == 1, runs
    alone = runs[1]
    for run in runs.values():
        assert run["norms"] == alone["norms"] and run["rates"] == alone["rates"]
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-5) and len(run["losses"]) == 5
        assert run["samples"] == (12 if name == "even" else 14)
    counts = [rank[name]["accumulated"] for rank in with_leaves[3]]
    assert counts == ([2, 2, 2] if name == "even" else [3, 2, 2])
    if name == "mean":  # by batch_shares
        assert [rank[name]["accumulated"] for rank in with_leaves[2]] == [5, 2]


@pytest.mark.parametrize("name", ["even", "uneven"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_with_leaves_goes_on_with_other_ranks_on_the_same_curve(
    with_leaves: dict[int, list[dict[str, Any]]], name: str, world: int
) -> None:
    run = with_leaves[world][0]
    assert run[f"{name} resumed"]["hash"] == run[name]["hash"]


def test_leaves_of_the_trainer_are_those_of_a_loop_by_hand(
    with_leaves: dict[int, list[dict[str, Any]]],
) -> None:
    for ranks in with_leaves.values():
        assert ranks[0]["mean"]["hash"] == ranks[0]["by hand"]


class _Unsized(torch.utils.data.IterableDataset[Any]):
    """A dataset that has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient_accumulation_steps": 3}, "steps=3 contradicts leaves=8 on 2 ranks, which"),
        ({"average_tokens_across_devices": False}, "averages over the tokens of one rank"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' does not"),
        ({"group_by_length": True}, "'group_by_length' does not"),
        ({"leaves": 7, "include_num_input_tokens_seen": "all"}, "gives 2 ranks .4, 3. of them"),
        ({"leaves": 1}, "every rank needs one at least"),
    ],
)
def test_arguments_under_which_leaves_would_depend_on_the_ranks_are_refused(
    change: dict[str, Any], message: str
) -> None:
    from types import SimpleNamespace

    from zeroshard.integrations.transformers import _leaves_of

    given = {
        "leaves": 8,
        "world_size": 2,
        "process_index": 0,
        "gradient_accumulation_steps": 1,
        "average_tokens_across_devices": True,
    }
    given |= change
    config = zs.Config(leaves=given.pop("leaves"))
    with pytest.raises(zs.ConfigError, match=message):
        _leaves_of(config, SimpleNamespace(**given))


def test_samples_that_do_not_follow_from_a_leafs_number_are_refused(tmp_path: Path) -> None:
    from tests.support.trainer_leaves import Mean, trainer_of
    from zeroshard.integrations.transformers import ZeroTrainer

    class Samples(ZeroTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args)

    trainer = trainer_of(tmp_path, Mean(), {"leaves": 8}, _Unsized())
    with pytest.raises(zs.ConfigError, match="train_dataset has no length"):
        trainer.get_train_dataloader()
    chooses = Samples(zero={"leaves": 8}, model=Mean(), args=trainer.args, train_dataset=[1])
    with pytest.raises(zs.ConfigError, match=r"Samples chooses samples itself in _get_train_sampl"):
        chooses.get_train_dataloader()


@pytest.mark.slow
@pytest.mark.parametrize("output", ["with checkpoints", "without"])
@pytest.mark.parametrize("way", ["native", "deepspeed"])
def test_the_example_trains_natively_and_with_a_plain_trainer(
    way: str, output: str, tmp_path: Path
) -> None:
    script, config = str(ROOT / "examples" / "train_hf.py"), str(ROOT / "examples" / "zero.json")
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2"]
    if way == "native":
        command += [script, "--config", config]
    else:
        command += ["--as-deepspeed", script, "--deepspeed", config]
    command += ["--max-steps", "2"]
    if output == "with checkpoints":
        command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "validation loss: " in done.stdout
    if way == "native":
        assert "at rest" in done.stdout
    else:
        assert "policy=zero3" in done.stderr
    assert (tmp_path / "checkpoint-2").is_dir() == (output == "with checkpoints")
