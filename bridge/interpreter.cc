#include "interpreter.h"

#include <nanobind/nanobind.h>

#include <mutex>
#include <vector>

namespace jax_mxfp4_moe {
namespace {

std::mutex pending_mutex;
std::vector<PyObject*>* pending = new std::vector<PyObject*>;  // never destroyed: executables may outlive statics
std::atomic<bool> has_pending{false};
PyObject* error_formatter = nullptr;

}  // namespace

void DropLater(PyObject* object) {
  if (object == nullptr || Entry::closed() || !Py_IsInitialized()) return;  // the interpreter is going: leave it
  if (PyGILState_Check()) {
    Py_DECREF(object);
    return;
  }
  std::lock_guard<std::mutex> lock(pending_mutex);
  pending->push_back(object);
  has_pending.store(true);
}

void DropPending() {
  if (!has_pending.load(std::memory_order_relaxed)) return;
  std::vector<PyObject*> taken;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    taken.swap(*pending);
    has_pending.store(false);
  }
  for (PyObject* object : taken) Py_DECREF(object);  // outside the mutex: a finaliser may drop another plan
}

std::string TakeError() {
  if (!PyErr_Occurred()) return "an error without a Python exception";
  nanobind::python_error error;  // takes the exception
  std::string text;
  if (error_formatter != nullptr) {
    Ref formatted(PyObject_CallOneArg(error_formatter, error.value().ptr()));
    const char* utf8 = formatted ? PyUnicode_AsUTF8(formatted.get()) : nullptr;
    if (utf8 != nullptr) return utf8;
    PyErr_Clear();
  }
  return error.what();
}

void SetErrorFormatter(PyObject* callable) {
  Py_INCREF(callable);
  Py_XDECREF(std::exchange(error_formatter, callable));
}

}  // namespace jax_mxfp4_moe
