// ShmComm for Python (serried/parallel/shm.py). Memory is given as addresses, so that a call costs 0.1 us and neither
// NumPy nor PyTorch is needed here; whoever calls keeps it alive and large enough.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "comm/shm.hpp"
#include "comm/wait.hpp"

namespace serried {

namespace nb = nanobind;

// serried._native._core.CommError(rank, reason), a RuntimeError. Lives as long as the interpreter.
inline PyObject*& comm_error_type() {
  static PyObject* type = nullptr;
  return type;
}

inline void translate_comm_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const CommError& error) {
    nb::tuple args = nb::make_tuple(error.rank, error.what());
    PyErr_SetObject(comm_error_type(), args.ptr());
  }
}

// Lets a Ctrl-C end a wait. Signal handlers run in the main thread only; elsewhere this does nothing.
inline void raise_if_interrupted() {
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void bind_comm_operations(nb::class_<ShmComm>& comm) {
  const auto free = nb::call_guard<nb::gil_scoped_release>();
  comm.def(
          "all_reduce",
          [](ShmComm& c, uintptr_t x, int64_t count, int element, int algorithm) {
            c.all_reduce(pointer<void>(x), count, static_cast<Element>(element), static_cast<Algorithm>(algorithm));
          },
          free, nb::arg("x"), nb::arg("count"), nb::arg("element"), nb::arg("algorithm"))
      .def(
          "reduce_nodes",
          [](ShmComm& c, uintptr_t nodes, uintptr_t counts, uintptr_t pairs, int32_t pair_count, int32_t rows,
             int32_t result, int64_t tokens, int64_t columns, uintptr_t out, int algorithm) {
            const Fold fold{pointer<const int32_t>(pairs), pair_count, rows, result};
            c.reduce_nodes(pointer<const float>(nodes), pointer<const int32_t>(counts), fold, tokens, columns,
                           pointer<float>(out), static_cast<Algorithm>(algorithm));
          },
          free, nb::arg("nodes"), nb::arg("counts"), nb::arg("pairs"), nb::arg("pair_count"), nb::arg("rows"),
          nb::arg("result"), nb::arg("tokens"), nb::arg("columns"), nb::arg("out"), nb::arg("algorithm"))
      .def(
          "reduce_scatter",
          [](ShmComm& c, uintptr_t x, const std::vector<int64_t>& counts, int element, uintptr_t out) {
            c.reduce_scatter(pointer<const void>(x), counts.data(), static_cast<Element>(element), pointer<void>(out));
          },
          free, nb::arg("x"), nb::arg("counts"), nb::arg("element"), nb::arg("out"))
      .def(
          "all_gather",
          [](ShmComm& c, uintptr_t x, int64_t rows, const std::vector<int64_t>& parts, uintptr_t out) {
            c.all_gather(pointer<const void>(x), rows, parts.data(), pointer<void>(out));
          },
          free, nb::arg("x"), nb::arg("rows"), nb::arg("parts"), nb::arg("out"))
      .def(
          "gather",
          [](ShmComm& c, uintptr_t x, int64_t rows, const std::vector<int64_t>& parts, int root, uintptr_t out) {
            c.gather(pointer<const void>(x), rows, parts.data(), root, pointer<void>(out));
          },
          free, nb::arg("x"), nb::arg("rows"), nb::arg("parts"), nb::arg("root"), nb::arg("out"))
      .def(
          "broadcast",
          [](ShmComm& c, uintptr_t x, size_t bytes, int root) { c.broadcast(pointer<void>(x), bytes, root); }, free,
          nb::arg("x"), nb::arg("bytes"), nb::arg("root"))
      .def(
          "send", [](ShmComm& c, uintptr_t x, size_t bytes, int to) { c.send(pointer<const void>(x), bytes, to); },
          free, nb::arg("x"), nb::arg("bytes"), nb::arg("to"))
      .def(
          "recv", [](ShmComm& c, uintptr_t x, size_t bytes, int source) { c.recv(pointer<void>(x), bytes, source); },
          free, nb::arg("x"), nb::arg("bytes"), nb::arg("source"))
      .def("barrier", &ShmComm::barrier, free)
      .def("agree_min", &ShmComm::agree_min, free, nb::arg("value"))
      .def("subgroup", &ShmComm::subgroup, free, nb::arg("ranks"))
      .def("step_ring", &ShmComm::step_ring, free);
}

inline nb::dict comm_stats(const ShmComm& comm) {
  nb::dict all;
  for (int i = 1; i < static_cast<int>(Op::kCount); ++i) {
    const OpStats& s = comm.stats(static_cast<Op>(i));
    if (s.calls) all[op_name(static_cast<Op>(i))] = nb::make_tuple(s.calls, s.bytes, s.wait_ns, s.total_ns);
  }
  return all;
}

inline void bind_comm(nb::module_& m) {
  const std::string name = nb::cast<std::string>(m.attr("__name__")) + ".CommError";
  comm_error_type() = PyErr_NewException(name.c_str(), PyExc_RuntimeError, nullptr);
  m.attr("CommError") = nb::handle(comm_error_type());
  nb::register_exception_translator(translate_comm_error);

  nb::class_<StepRing>(m, "StepRing")
      .def(
          "write",
          [](StepRing& ring, const nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& frame,
             double timeout) {
            nb::gil_scoped_release release;
            ring.write(frame.data(), frame.nbytes(), static_cast<int64_t>(std::min(timeout, 1e9) * kSecond));
          },
          nb::arg("frame"), nb::arg("timeout"))
      .def("read", [](StepRing& ring) {
        std::string frame;
        {
          nb::gil_scoped_release release;
          frame = ring.read();
        }
        return nb::bytes(frame.data(), frame.size());
      });

  nb::class_<ShmComm> comm(m, "ShmComm");
  comm.def(
          "__init__",
          [](ShmComm* self, int fd, int rank, int size, size_t slot_bytes, double timeout) {
            new (self) ShmComm(fd, rank, size, slot_bytes, timeout);
            self->set_interrupt(raise_if_interrupted);
          },
          nb::arg("fd"), nb::arg("rank"), nb::arg("size"), nb::arg("slot_bytes") = size_t{1} << 20,
          nb::arg("timeout") = 60.0)
      .def_prop_ro("rank", &ShmComm::rank)
      .def_prop_ro("size", &ShmComm::size)
      .def_prop_ro("slot_bytes", &ShmComm::slot_bytes)
      .def_prop_rw("timeout", &ShmComm::timeout, &ShmComm::set_timeout)
      .def("absent", &ShmComm::absent, nb::call_guard<nb::gil_scoped_release>(), nb::arg("seconds"))
      .def("tick", &ShmComm::tick)
      .def("fail", [](ShmComm& c, const std::string& reason) { c.fail(reason); }, nb::arg("reason"))
      .def("close", &ShmComm::close)
      .def("stats", &comm_stats)
      .def("reset_stats", &ShmComm::reset_stats);
  bind_comm_operations(comm);
}

}  // namespace serried
