#include "collectives.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <map>
#include <mutex>
#include <utility>

#include "lanes.h"
#include "tensors.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// What a collective does with the host's tensors once the lane gets there; it returns gloo's Work,
// or null where it is done.
using Body = std::function<intrusive_ptr<Work>(c10d::Backend&, Tensors&)>;

struct Part {  // one collective, or one of those that a group of calls starts together
  std::string kind;  // with its root and its bytes, where all ranks have the same; "": of two ranks
  std::string dtype;
  std::vector<KernelTensor> tensors;
  Body body;
};

// Compares what each rank has come to. A communicator knows no names: calls meet by their order
// alone. Those of one kind and size mix their numbers, whatever they are; others wait for ever,
// which is told here at once.
void meet(c10d::Backend& host, const std::vector<Part>& parts) {
  std::string mine;
  for (const Part& part : parts) {
    if (part.kind.empty()) return;
    mine += part.kind + "; ";
  }
  constexpr int64_t size = 160;
  if (mine.size() > size) mine = mine.substr(0, 120) + std::to_string(std::hash<std::string>{}(mine));
  mine.resize(size, ' ');
  Tensors own{at::from_blob(mine.data(), {size}, at::kChar)};
  TensorLists all{{}};
  for (int rank = 0; rank < host.getSize(); ++rank) all[0].push_back(at::empty({size}, at::kChar));
  host.allgather(all, own)->wait();
  std::string told;
  bool differs = false;
  for (const Tensor& one : all[0]) {
    const std::string text(static_cast<const char*>(one.const_data_ptr()), size);
    differs |= text != mine;
    told += "\n  " + text.substr(0, text.find_last_not_of("; ") + 1);
  }
  TORCH_CHECK(!differs, "zccl: ranks wait for ever in collectives that do not meet:", told);
}

void run_together(c10d::Backend& host, const std::vector<Part>& parts) {
  if (host.getSize() > 1) meet(host, parts);
  TensorLists tensors;  // until all are done
  std::vector<intrusive_ptr<Work>> works;
  for (const Part& part : parts) {
    auto& own = tensors.emplace_back();
    for (const KernelTensor& one : part.tensors) own.push_back(on_cpu(one));
    works.push_back(part.body(host, own));
  }
  for (const auto& work : works)
    if (work) work->wait();
}

// NCCL's, as PyTorch gives them to it; float8 since NCCL 2.24 alone.
bool has_type(at::ScalarType type) {
  switch (type) {
    case at::kByte: case at::kChar: case at::kBool: case at::kInt: case at::kLong:
    case at::kHalf: case at::kBFloat16: case at::kFloat: case at::kDouble:
      return true;
    default:
      return false;
  }
}

std::mutex order;  // of the collectives of a process, over all groups
MarkPtr last;
std::vector<std::string> launched;
std::string launched_for;  // what the program says that the next ones are for

class LaneWork final : public Work {
 public:
  LaneWork(OpType type, int rank, Lane lane, MarkPtr mark, Tensors held, bool is_barrier)
      : Work(rank, type), lane_(lane), mark_(std::move(mark)), held_(std::move(held)),
        is_barrier_(is_barrier) {}

  bool isCompleted() override { return is_reached(mark_); }
  bool isSuccess() const override { return mark_->reached; }
  void synchronize() override {  // the current stream waits
    lane_waits(current_lane(lane_.device), mark_);
    held_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (is_barrier_) host_waits(mark_, "barrier");
    return true;
  }
  std::vector<Tensor> result() override { return held_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::Device device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(lane_.device));
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    // on the lane: who waits for the future waits for what that lane has by now
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device, lane_.stream));
    future->markCompleted(c10::IValue(held_));
    return future;
  }

 private:
  const Lane lane_;
  const MarkPtr mark_;
  Tensors held_;  // until somebody waits, as NCCL's does
  const bool is_barrier_;
};

Tensors flat(const TensorLists& lists, const Tensors& more) {
  Tensors out;
  for (const Tensors& list : lists) out.insert(out.end(), list.begin(), list.end());
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// A body that reduces into its tensor `out`. Gloo has no average: the sum, divided when it is there.
template <typename Options, typename Call>
Body reducing(Options options, int64_t out, int size, Call call) {
  const bool averages = options.reduceOp == c10d::ReduceOp::AVG;
  if (averages) options.reduceOp = c10d::ReduceOp::SUM;
  return [=](c10d::Backend& host, Tensors& t) {
    intrusive_ptr<Work> work = call(host, t, options);
    if (averages) {
      work->wait();
      t[out].div_(size);
    }
    return averages ? intrusive_ptr<Work>() : work;
  };
}

class Zccl final : public c10d::Backend {
 public:
  Zccl(const intrusive_ptr<c10d::Backend>& host, std::chrono::milliseconds timeout)
      : Backend(host->getRank(), host->getSize()), host_(host),
        options_(c10::make_intrusive<Options>("zccl", timeout)) {}

  const std::string getBackendName() const override { return "zccl"; }
  intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  bool supportsCoalescing() const override { return true; }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return launch("broadcast", OpType::BROADCAST, tensors, o.asyncOp,
                  [o](auto& host, auto& t) { return host.broadcast(t, o); }, true, o.rootRank);
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return launch("allreduce", OpType::ALLREDUCE, tensors, o.asyncOp,
                  reducing(o, 0, size_, [](auto& host, auto& t, auto& options) {
                    return host.allreduce(t, options);
                  }));
  }

  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return launch("reduce", OpType::REDUCE, tensors, o.asyncOp,
                  reducing(o, 0, size_, [](auto& host, auto& t, auto& options) {
                    return host.reduce(t, options);
                  }), true, o.rootRank);
  }

  intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in,
                                      const c10d::AllgatherOptions& o) override {
    return launch("allgather", OpType::_ALLGATHER_BASE, {out, in}, o.asyncOp,
                  [o](auto& host, auto& t) {
                    t[1] = t[1].clone();  // NCCL's may be in place, gloo's not
                    return host._allgather_base(t[0], t[1], o);
                  });
  }

  intrusive_ptr<Work> allgather(TensorLists& outs, Tensors& ins,
                                const c10d::AllgatherOptions& o) override {
    return launch("allgather", OpType::ALLGATHER, flat(outs, ins), o.asyncOp,
                  [o](auto& host, auto& t) {
                    TensorLists out{{t.begin(), t.end() - 1}};
                    Tensors in{t.back().clone()};
                    t.push_back(in[0]);  // lives until gloo is done
                    return host.allgather(out, in, o);
                  });
  }

  intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                           const c10d::ReduceScatterOptions& o) override {
    return launch("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {out, in}, o.asyncOp,
                  reducing(o, 0, size_, [](auto& host, auto& t, auto& options) {
                    t[1] = t[1].clone();
                    return host._reduce_scatter_base(t[0], t[1], options);
                  }));
  }

  intrusive_ptr<Work> reduce_scatter(Tensors& outs, TensorLists& ins,
                                     const c10d::ReduceScatterOptions& o) override {
    return launch("reduce_scatter", OpType::REDUCE_SCATTER, flat({outs}, ins[0]), o.asyncOp,
                  reducing(o, 0, size_, [](auto& host, auto& t, auto& options) {
                    Tensors out{t[0]};
                    TensorLists in{{t.begin() + 1, t.end()}};
                    return host.reduce_scatter(out, in, options);
                  }));
  }

  intrusive_ptr<Work> gather(TensorLists& outs, Tensors& ins,
                             const c10d::GatherOptions& o) override {
    return launch("gather", OpType::GATHER, flat(outs, ins), o.asyncOp, [o](auto& host, auto& t) {
      TensorLists out;
      if (t.size() > 1) out.push_back({t.begin(), t.end() - 1});
      Tensors in{t.back()};
      return host.gather(out, in, o);
    }, true, o.rootRank);
  }

  intrusive_ptr<Work> scatter(Tensors& outs, TensorLists& ins,
                              const c10d::ScatterOptions& o) override {
    return launch("scatter", OpType::SCATTER, flat(ins, outs), o.asyncOp,
                  [o](auto& host, auto& t) {
                    TensorLists in;
                    if (t.size() > 1) in.push_back({t.begin(), t.end() - 1});
                    Tensors out{t.back()};
                    return host.scatter(out, in, o);
                  }, true, o.rootRank);
  }

  intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& receives,
                                    std::vector<int64_t>& sends,
                                    const c10d::AllToAllOptions& o) override {
    return launch("alltoall", OpType::ALLTOALL_BASE, {out, in}, o.asyncOp,
                  [o, receives, sends](auto& host, auto& t) mutable {
                    return host.alltoall_base(t[0], t[1], receives, sends, o);
                  }, false);
  }

  intrusive_ptr<Work> alltoall(Tensors& outs, Tensors& ins,
                               const c10d::AllToAllOptions& o) override {
    return launch("alltoall", OpType::ALLTOALL, flat({outs}, ins), o.asyncOp,
                  [o, n = size_](auto& host, auto& t) {
                    Tensors out(t.begin(), t.begin() + n), in(t.begin() + n, t.end());
                    return host.alltoall(out, in, o);
                  }, false);
  }

  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    return launch("send", OpType::SEND, tensors, true,
                  [=](auto& host, auto& t) { return host.send(t, to, tag); });
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return launch("recv", OpType::RECV, tensors, true,
                  [=](auto& host, auto& t) { return host.recv(t, from, tag); });
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& o) override {
    return enqueue_parts("barrier", OpType::BARRIER, current_device(), o.asyncOp, {},
                         {{"barrier", "", {}, [o](auto& host, auto&) { return host.barrier(o); }}});
  }

  // Several at once: from here, calls are collected ...
  void startCoalescing() override { collects_ = true; }
  // ... and start together, in one task.
  intrusive_ptr<Work> endCoalescing() override {
    collects_ = false;
    if (collected_.empty()) return {};
    const int device = collected_held_[0].device().index();
    return enqueue_parts("coalesced", OpType::COALESCED, device, true,
                         std::exchange(collected_held_, {}), std::exchange(collected_, {}));
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& o) override {
    return together(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      allreduce(one, o);
    });
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                                      const c10d::AllgatherOptions& o) override {
    return together(outs.size(), [&](size_t i) { _allgather_base(outs[i], ins[i], o); });
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& o) override {
    return together(outs.size(), [&](size_t i) { _reduce_scatter_base(outs[i], ins[i], o); });
  }

 private:
  template <typename Call>
  intrusive_ptr<Work> together(size_t count, Call&& call) {
    startCoalescing();
    for (size_t i = 0; i < count; ++i) call(i);
    return endCoalescing();
  }

  // `is_sized`: the first tensor is as large on every rank.
  intrusive_ptr<Work> launch(const char* name, OpType type, Tensors tensors, bool is_async,
                             Body body, bool is_sized = true, int64_t root = -1) {
    Part part{"", toString(tensors[0].scalar_type()), {}, std::move(body)};
    if (type != OpType::SEND && type != OpType::RECV) {
      part.kind = name;
      if (root >= 0) part.kind += " of rank " + std::to_string(root);
      if (is_sized) part.kind += " " + std::to_string(tensors[0].nbytes());
    }
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor), "zccl: a tensor of ", tensor.device(), " in ", name);
      TORCH_CHECK(has_type(tensor.scalar_type()), "zccl: NCCL has no type for ",
                  tensor.scalar_type(), " in ", name);
      TORCH_CHECK(tensor.is_contiguous(), "zccl: tensors must be contiguous in ", name);
      part.tensors.push_back(for_kernel(tensor));
    }
    const int device = tensors[0].device().index();
    if (!collects_)
      return enqueue_parts(name, type, device, is_async, std::move(tensors), {std::move(part)});
    collected_.push_back(std::move(part));
    collected_held_.insert(collected_held_.end(), tensors.begin(), tensors.end());
    return {};
  }

  intrusive_ptr<Work> enqueue_parts(const char* name, OpType type, int device, bool is_async,
                                    Tensors held, std::vector<Part> parts) {
    ++calls_;
    Lane lane = current_lane(device);
    const std::string from = std::to_string(lane.stream);
    if (is_async) {  // as NCCL's: a stream of its own, which comes after the current one
      auto own = own_streams_.find(device);
      if (own == own_streams_.end()) own = own_streams_.emplace(device, new_stream(device)).first;
      const MarkPtr now = mark(lane);
      lane.stream = own->second;
      lane_waits(lane, now);
    } else {
      held.clear();  // freed on the stream that uses them
    }
    auto done = std::make_shared<Mark>();
    {
      // Collectives of a process start in the order of their calls, whatever their groups and
      // lanes: one that blocks a lazy schedule's only thread would wait for a rank that waits for
      // it.
      const std::lock_guard<std::mutex> lock(order);
      for (const Part& part : parts)
        if (!part.kind.empty())
          launched.push_back(from + "|" + getGroupUid() + "|" +
                             std::to_string(size_) + "|" + part.kind + "|" + part.dtype + "|" +
                             launched_for);
      enqueue(lane, name,
              [host = host_, parts = std::move(parts)] { run_together(*host, parts); },
              std::exchange(last, done), done);
    }
    return c10::make_intrusive<LaneWork>(type, getRank(), lane, done, std::move(held),
                                         type == OpType::BARRIER);
  }

  const intrusive_ptr<c10d::Backend> host_;
  const intrusive_ptr<Options> options_;
  std::map<int, int64_t> own_streams_;  // by device
  uint64_t calls_ = 0;
  bool collects_ = false;
  std::vector<Part> collected_;
  Tensors collected_held_;
};

}  // namespace

intrusive_ptr<c10d::Backend> zccl_over(const intrusive_ptr<c10d::Backend>& host,
                                       std::chrono::milliseconds timeout) {
  return c10::make_intrusive<Zccl>(host, timeout);
}

std::vector<std::string> take_collectives() {
  const std::lock_guard<std::mutex> lock(order);
  return std::exchange(launched, {});
}

void name_collectives(const std::string& name) {
  const std::lock_guard<std::mutex> lock(order);
  launched_for = name;
}

}  // namespace zsim
