// The interpreter lock, references that may be dropped by any thread, and Python errors as text. Rules: README.md.
#pragma once

#include <Python.h>

#include <atomic>
#include <string>
#include <utility>

namespace jax_mxfp4_moe {

// An owned Python reference, held only where the interpreter lock is held (rule 5).
class Ref {
 public:
  explicit Ref(PyObject* stolen = nullptr) : object_(stolen) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Drops a reference from a thread that may not hold the interpreter lock (rule 6): at once if it does hold it, else
// later, by the next call that does. Never waits for the lock.
void DropLater(PyObject* object);
void DropPending();  // lock held

// One entry into Python from a runtime thread (rule 7). Test entered() before Gil is constructed.
class Entry {
 public:
  Entry() { count_.fetch_add(1); }  // counted before `closed` is read, so that Close() sees every caller it let in
  ~Entry() { count_.fetch_sub(1); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  bool entered() const { return !closed_.load() && Py_IsInitialized(); }

  static void Close() { closed_.store(true); }
  static bool closed() { return closed_.load(); }
  static int count() { return count_.load(); }

 private:
  inline static std::atomic<int> count_{0};
  inline static std::atomic<bool> closed_{false};
};

// The interpreter lock (rule 5).
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Takes the current Python exception and returns its type, message and traceback (rule 10). Lock held.
std::string TakeError();
void SetErrorFormatter(PyObject* callable);  // lock held; callable(exception) -> str

}  // namespace jax_mxfp4_moe
