// What Python sees, and collectives: gloo's, run by the lane on the device's own memory.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <map>
#include <mutex>
#include <thread>
#include <pybind11/stl.h>

#include <c10/core/CachingDeviceAllocator.h>

#include "device.h"
#include "ops.h"

namespace py = pybind11;

namespace zsim {

using at::Tensor;
using c10::intrusive_ptr;
using c10d::Work;

class SimWork final : public Work {
 public:
  SimWork(c10d::OpType type, int rank, int device, RecordPtr mark, std::vector<Tensor> held)
      : Work(rank, type), device_(device), mark_(std::move(mark)), held_(std::move(held)) {}
  bool isCompleted() override { return poll(mark_); }
  bool isSuccess() const override { return mark_->done; }
  void synchronize() override {
    lane_waits(here(device_), mark_);
    held_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device_))});
    future->markCompleted(c10::IValue(held_));
    return future;
  }

 private:
  int device_;
  RecordPtr mark_;
  std::vector<Tensor> held_;
};

class ProcessGroupZccl final : public c10d::Backend {
 public:
  ProcessGroupZccl(intrusive_ptr<c10d::Backend> host, std::chrono::milliseconds timeout)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)),
        options_(c10::make_intrusive<Options>("zccl", timeout)) {}
  const std::string getBackendName() const override { return "zccl"; }
  intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& o) override {
    return launch("broadcast", c10d::OpType::BROADCAST, tensors, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) { return host.broadcast(t, o); });
  }
  intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& o) override {
    return launch("allreduce", c10d::OpType::ALLREDUCE, tensors, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) { return host.allreduce(t, o); });
  }
  intrusive_ptr<Work> reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& o) override {
    return launch("reduce", c10d::OpType::REDUCE, tensors, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) { return host.reduce(t, o); });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return launch("allgather", c10d::OpType::_ALLGATHER_BASE, {out, in}, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) {
          Tensor own = t[1].clone();  // gloo's is not in place
          return host._allgather_base(t[0], own, o);
        });
  }
  intrusive_ptr<Work> allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins,
      const c10d::AllgatherOptions& o) override {
    std::vector<Tensor> all = outs[0];
    all.push_back(ins[0]);
    return launch("allgather", c10d::OpType::ALLGATHER, all, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) {
          std::vector<Tensor> in{t.back().clone()};
          std::vector<std::vector<Tensor>> out{{t.begin(), t.end() - 1}};
          return host.allgather(out, in, o);
        });
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return launch("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, {out, in}, o.asyncOp,
        [o](c10d::Backend& host, std::vector<Tensor>& t) {
          Tensor all = t[1].clone();
          std::vector<Tensor> sum{all};
          c10d::AllreduceOptions a;
          a.reduceOp = o.reduceOp;
          host.allreduce(sum, a)->wait();
          t[0].copy_(all.view({host.getSize(), -1})[host.getRank()].view_as(t[0]));
          return intrusive_ptr<Work>();
        });
  }
  intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& receives,
      std::vector<int64_t>& sends, const c10d::AllToAllOptions& o) override {
    return launch("alltoall", c10d::OpType::ALLTOALL_BASE, {out, in}, o.asyncOp,
        [o, receives, sends](c10d::Backend& host, std::vector<Tensor>& t) {
          auto r = receives, s = sends;
          return host.alltoall_base(t[0], t[1], r, s, o);
        });
  }
  intrusive_ptr<Work> send(std::vector<Tensor>& tensors, int to, int tag) override {
    return launch("send", c10d::OpType::SEND, tensors, true,
        [=](c10d::Backend& host, std::vector<Tensor>& t) { return host.send(t, to, tag); });
  }
  intrusive_ptr<Work> recv(std::vector<Tensor>& tensors, int from, int tag) override {
    return launch("recv", c10d::OpType::RECV, tensors, true,
        [=](c10d::Backend& host, std::vector<Tensor>& t) { return host.recv(t, from, tag); });
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& o) override { return host_->barrier(o); }

 private:
  using Body = std::function<intrusive_ptr<Work>(c10d::Backend&, std::vector<Tensor>&)>;

  intrusive_ptr<Work> launch(const char* name, c10d::OpType type, std::vector<Tensor> tensors, bool is_async, Body body) {
    const int device = tensors[0].device().index();
    Lane lane = here(device);
    if (is_async) {  // as NCCL's backend: a stream of its own
      if (inner_ < 0) inner_ = new_stream(device, -1);
      const Lane inner{lane.device, inner_};
      lane_waits(inner, record(lane));
      lane = inner;
    }
    std::vector<Spec> specs;
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_contiguous(), "zccl: tensors must be contiguous");
      specs.push_back(spec_of(tensor));
    }
    auto mark = std::make_shared<Record>();
    RecordPtr before;
    {
      static std::mutex order;
      static std::map<int, RecordPtr> last;  // collectives begin in the order of their calls
      std::lock_guard<std::mutex> lock(order);
      before = std::exchange(last[device], mark);
      enqueue(lane, name, [host = host_, specs = std::move(specs), body = std::move(body)] {
        std::vector<Tensor> cpu;
        for (const Spec& spec : specs) cpu.push_back(as_cpu(spec));
        if (auto work = body(*host, cpu)) work->wait();
      }, before, mark);
    }
    return c10::make_intrusive<SimWork>(type, getRank(), device, mark,
        is_async ? std::move(tensors) : std::vector<Tensor>{});
  }

  intrusive_ptr<c10d::Backend> host_;
  intrusive_ptr<Options> options_;
  int64_t inner_ = -1;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module::import("torch.distributed");
  using Free = py::call_guard<py::gil_scoped_release>;
  m.def("set_schedule", &set_schedule, Free());
  m.def("schedule", &schedule);
  m.def("set_delay", &set_delay);
  m.def("take_log", &take_log);
  m.def("host_waits", [] {
    auto reasons = host_wait_reasons();
    return std::map<std::string, uint64_t>(reasons.begin(), reasons.end());
  });
  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_info", [](int device) {
    return c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
  });
  m.def("device_count", &device_count);
  m.def("synchronous_operators", &synchronous_operators);
  m.def("launched_operators", &launched_operators);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("sleep", [](int64_t us, int device) {
    enqueue(here(device), "sleep", [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  m.def("generator", [](int device) { return default_generator(device); });
  py::class_<ProcessGroupZccl, intrusive_ptr<ProcessGroupZccl>, c10d::Backend>(m, "ProcessGroupZccl")
      .def(py::init<intrusive_ptr<c10d::Backend>, std::chrono::milliseconds>());
}

}  // namespace zsim
