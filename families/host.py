"""The part of a call's host path that Python is too slow for, in C: the driver call, and the sum of weights' versions.

Compiled at first use with the C compiler Triton needs for its own launches, and kept in Triton's cache.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

CODE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#define MOST 24

typedef int (*launch_t)(
    void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

// A kernel with everything but its first pointers bound. Parameters are eight bytes apart, whatever their size.
typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  launch_t launch;
  void *function;
  unsigned grid, threads, shared;
  Py_ssize_t pointers, count;
  uint64_t values[MOST];
  PyObject *enter;
} Launcher;

#define NO_CONTEXT 201  // CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet

static PyObject *launcher_call(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names) {
  Launcher *self = (Launcher *)object;
  if (PyVectorcall_NARGS(flags) != self->pointers + 1 || names != NULL)
    return PyErr_Format(PyExc_TypeError, "expected a stream and %zd addresses", self->pointers);
  uint64_t stream = PyLong_AsUnsignedLongLong(arguments[0]);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  // Copies of this call's own: other threads run while the driver waits for room in its queue.
  uint64_t values[MOST];
  void *parameters[MOST];
  for (Py_ssize_t i = 0; i < self->count; i++) {
    values[i] = self->values[i];
    parameters[i] = &values[i];
  }
  for (Py_ssize_t i = 0; i < self->pointers; i++) {
    values[i] = arguments[i + 1] == Py_None ? 0 : PyLong_AsUnsignedLongLong(arguments[i + 1]);
    if (values[i] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  int status = 0;
  for (int attempt = 0; attempt < 2; attempt++) {
    Py_BEGIN_ALLOW_THREADS;
    status = self->launch(
        self->function, self->grid, 1, 1, self->threads, 1, 1, self->shared, (void *)(uintptr_t)stream,
        parameters, NULL);
    Py_END_ALLOW_THREADS;
    if (status != NO_CONTEXT || attempt > 0) break;
    PyObject *entered = PyObject_CallNoArgs(self->enter);
    if (entered == NULL) return NULL;
    Py_DECREF(entered);
  }
  if (status != 0) return PyErr_Format(PyExc_RuntimeError, "the driver refused the launch with status %d", status);
  Py_RETURN_NONE;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  unsigned long long entry, function;
  unsigned grid, threads, shared;
  Py_ssize_t pointers;
  PyObject *fixed, *enter;
  if (!PyArg_ParseTuple(
          arguments, "KKIIInO!O", &entry, &function, &grid, &threads, &shared, &pointers, &PyTuple_Type, &fixed,
          &enter))
    return NULL;
  if (pointers < 0 || pointers + PyTuple_GET_SIZE(fixed) > MOST)
    return PyErr_Format(PyExc_ValueError, "a launcher holds at most %d parameters", MOST);
  Launcher *self = (Launcher *)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->call = launcher_call;
  self->launch = (launch_t)(uintptr_t)entry;
  self->function = (void *)(uintptr_t)function;
  self->grid = grid;
  self->threads = threads;
  self->shared = shared;
  self->pointers = pointers;
  self->count = pointers + PyTuple_GET_SIZE(fixed);
  self->enter = Py_NewRef(enter);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fixed); i++) {
    self->values[pointers + i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(fixed, i));
    if (PyErr_Occurred()) {
      Py_DECREF(self);
      return NULL;
    }
  }
  return (PyObject *)self;
}

static void launcher_dealloc(PyObject *object) {
  Py_XDECREF(((Launcher *)object)->enter);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "rooflane_host.Launcher",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launcher, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = launcher_new,
    .tp_dealloc = launcher_dealloc,
};

// Sum of an attribute that is a getter over a list of objects of one type, without looking it up on each.
static PyObject *sum_getter(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(arguments[0]) || !Py_IS_TYPE(arguments[1], &PyGetSetDescr_Type))
    return PyErr_Format(PyExc_TypeError, "expected a list and a getset descriptor");
  PyGetSetDescrObject *getter = (PyGetSetDescrObject *)arguments[1];
  PyTypeObject *owner = PyDescr_TYPE(getter);
  long long total = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); i++) {
    PyObject *item = PyList_GET_ITEM(arguments[0], i);
    if (!PyObject_TypeCheck(item, owner)) return PyErr_Format(PyExc_TypeError, "%R has no such getter", item);
    PyObject *value = getter->d_getset->get(item, getter->d_getset->closure);
    if (value == NULL) return NULL;
    total += PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (PyErr_Occurred()) return NULL;
  }
  return PyLong_FromLongLong(total);
}

static PyMethodDef methods[] = {{"sum_getter", (PyCFunction)(void (*)(void))sum_getter, METH_FASTCALL, NULL}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "rooflane_host", NULL, -1, methods};

PyMODINIT_FUNC PyInit_rooflane_host(void) {
  if (PyType_Ready(&LauncherType) < 0) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddObjectRef(module, "Launcher", (PyObject *)&LauncherType) < 0) Py_CLEAR(module);
  return module;
}
"""


@cache
def host_module() -> Any:
    """Return the compiled module.

    `Launcher(entry, function, grid, threads, shared_bytes, pointers, fixed, enter)` binds a kernel; called with a raw
    stream and `pointers` addresses (None is null) it launches, and raises `RuntimeError` when the driver refuses. Where
    the thread has no context yet, `enter()` is called and the launch tried again. `sum_getter(objects, descriptor)`
    sums an integer attribute. Raises `RuntimeError` when no C compiler can build it.
    """
    from triton.runtime.build import compile_module_from_src

    try:
        return compile_module_from_src(CODE, "rooflane_host")
    except (RuntimeError, subprocess.SubprocessError, OSError) as error:
        raise RuntimeError(
            f"the host's part of a launch could not be compiled: {' '.join(str(error).split())[:300]}; it takes a C "
            "compiler and Python's headers (Debian: apt-get install gcc python3-dev) and a folder that can be written "
            "(TRITON_CACHE_DIR); rooflane doctor says what is missing"
        ) from None


@cache
def version_sum() -> Callable[[list[Any]], int]:
    """Return a function that sums the versions of a list of parameters, its parts looked up once."""
    from torch._C import TensorBase

    getter, add = TensorBase.__dict__["_version"], host_module().sum_getter
    return lambda parameters: add(parameters, getter)
