// What is set around Python and put back on every path: floating-point mode, grad mode, device and stream.
// All of it is constructed with the interpreter lock held and with no Python exception pending.
#pragma once

#include <Python.h>

#include <cstdint>
#include <map>
#include <utility>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "interpreter.h"
#include "torch_api.h"

namespace jax_mxfp4_moe {

// The processor's default floating-point mode: subnormals are numbers (rule 9).
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() : saved_(Get()) { Set(kDefault); }
  ~DefaultFloatingPoint() { Set(saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
#if defined(__SSE__)
  using Word = unsigned int;
  static constexpr Word kDefault = 0x1F80;  // MXCSR at reset: exceptions masked, nearest even, no FTZ, no DAZ
  static Word Get() { return _mm_getcsr(); }
  static void Set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;  // FPCR: nearest even, no FZ, no FZ16
  static Word Get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Set(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word Get() { return 0; }
  static void Set(Word) {}
#endif
  Word saved_;
};

// torch.no_grad for this thread, without building a context manager. Nothing to do where torch is not used.
class NoGrad {
 public:
  NoGrad() {
    if (torch_api.set_grad_mode != nullptr) {
      was_enabled_ = torch_api.grad_mode();
      torch_api.set_grad_mode(false);
      return;
    }
    if (torch_api.is_grad_enabled == nullptr) return;
    Ref enabled(PyObject_CallNoArgs(torch_api.is_grad_enabled));
    was_enabled_ = enabled.get() == Py_True;
    failed_ = !enabled || (was_enabled_ && !Ref(PyObject_CallOneArg(torch_api.set_grad_enabled, Py_False)));
  }
  ~NoGrad() {
    if (torch_api.set_grad_mode != nullptr) {
      torch_api.set_grad_mode(was_enabled_);
    } else if (was_enabled_ && !Ref(PyObject_CallOneArg(torch_api.set_grad_enabled, Py_True))) {
      PyErr_WriteUnraisable(nullptr);
    }
  }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;
  bool failed() const { return failed_; }  // with a Python error set

 private:
  bool was_enabled_ = false;
  bool failed_ = false;
};

// torch's current device and that device's current stream are XLA's (rule 8).
class DeviceAndStream {
 public:
  DeviceAndStream(int32_t ordinal, void* stream) {
    Ref key = StreamKey(ordinal, stream);
    Ref index(key ? PyLong_FromLong(ordinal) : nullptr);
    if (!index) return;
    device_ = Ref(PyObject_CallOneArg(torch_api.exchange_device, index.get()));
    if (!device_) return;
    stream_ = Ref(PyObject_CallOneArg(torch_api.current_stream, index.get()));
    ok_ = stream_ && Ref(PyObject_CallObject(torch_api.set_stream, key.get()));
  }
  ~DeviceAndStream() {
    if (stream_ && !Ref(PyObject_CallObject(torch_api.set_stream, stream_.get()))) PyErr_WriteUnraisable(nullptr);
    if (device_ && !Ref(PyObject_CallOneArg(torch_api.exchange_device, device_.get()))) PyErr_WriteUnraisable(nullptr);
  }
  DeviceAndStream(const DeviceAndStream&) = delete;
  DeviceAndStream& operator=(const DeviceAndStream&) = delete;
  bool failed() const { return !ok_; }  // with a Python error set

 private:
  // torch's (id, index, type) of an external stream: a pure function of its arguments, so it may be kept. Bounded,
  // since the streams that a graph is captured on come and go.
  static Ref StreamKey(int32_t ordinal, void* stream) {
    static auto* keys = new std::map<std::pair<int32_t, void*>, Ref>;  // guarded by the interpreter lock
    auto it = keys->find({ordinal, stream});
    if (it != keys->end()) {
      Py_INCREF(it->second.get());
      return Ref(it->second.get());
    }
    PyObject* key = PyObject_CallFunction(torch_api.stream_key, "Ki",
                                          static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(stream)), ordinal);
    if (key == nullptr) return Ref();
    if (keys->size() >= 256) keys->clear();
    Py_INCREF(key);
    keys->insert_or_assign({ordinal, stream}, Ref(key));
    return Ref(key);
  }

  Ref device_;
  Ref stream_;
  bool ok_ = false;
};

}  // namespace jax_mxfp4_moe
