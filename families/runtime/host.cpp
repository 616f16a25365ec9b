// The host path of a call: the launch of a bound kernel, the common call of a bound forward, and the check
// of a model's weights. runtime/host.py builds this file at first use.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <bit>
#include <optional>
#include <stdexcept>
#include <vector>

namespace {

constexpr int POINTERS = 3;      // a kernel's first parameters: x, mask and output
constexpr int NO_CONTEXT = 201;  // CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet
constexpr uintptr_t ALIGNMENT = 16;
constexpr int UNCHANGED = 0, UNFIT = 2;  // what a refresh of the weights returns; runtime/weights.py

using Entry = int (*)(
    void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

// A kernel with everything but its tensors bound. Parameters are eight bytes apart, whatever their size.
struct Launcher {
  Entry entry;
  void *function;
  unsigned grid, threads, shared;
  std::vector<uint64_t> values;
  py::object enter, held;

  Launcher(
      uintptr_t entry, uintptr_t function, unsigned grid, unsigned threads, unsigned shared,
      const std::vector<uint64_t> &fixed, py::object enter, py::object held)
      : entry(reinterpret_cast<Entry>(entry)), function(reinterpret_cast<void *>(function)), grid(grid),
        threads(threads), shared(shared), values(POINTERS), enter(std::move(enter)), held(std::move(held)) {
    values.insert(values.end(), fixed.begin(), fixed.end());
  }

  std::array<py::object *, 2> parts() { return {&enter, &held}; }

  // Returns the driver's status. The driver may wait for room in its queue, so other threads run meanwhile and each
  // call has its own parameters.
  int submit(uintptr_t stream, const at::Tensor &x, const at::Tensor *mask, const at::Tensor &out) const {
    std::vector<uint64_t> own(values);
    own[0] = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    own[1] = mask == nullptr ? 0 : reinterpret_cast<uintptr_t>(mask->const_data_ptr());
    own[2] = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
    std::vector<void *> parameters(own.size());
    for (size_t i = 0; i < own.size(); i++) parameters[i] = &own[i];
    py::gil_scoped_release unlocked;
    return entry(
        function, grid, 1, 1, threads, 1, 1, shared, reinterpret_cast<void *>(stream), parameters.data(), nullptr);
  }

  // Submits once more, in a context, on a thread that had none. Throws when the driver refuses.
  void launch(uintptr_t stream, const at::Tensor &x, const at::Tensor *mask, const at::Tensor &out) const {
    int status = submit(stream, x, mask, out);
    if (status == NO_CONTEXT) {
      enter();
      status = submit(stream, x, mask, out);
    }
    if (status != 0) throw std::runtime_error("the driver refused the launch with status " + std::to_string(status));
  }
};

// A bound forward's call. A call that differs from the bound ones in any way takes the path in Python.
struct Call {
  py::object path;
  py::dict launches;
  py::object current_device, current_stream, enter, refresh, number;
  at::Device device;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  int index;
  std::optional<uintptr_t> entered;  // the stream of the last `enter`, which is not repeated

  Call(
      py::object path, py::dict launches, py::object current_device, py::object current_stream, py::object enter,
      py::object refresh, at::Device device, int index, at::ScalarType dtype, std::vector<int64_t> sizes)
      : path(std::move(path)), launches(std::move(launches)), current_device(std::move(current_device)),
        current_stream(std::move(current_stream)), enter(std::move(enter)), refresh(std::move(refresh)),
        number(py::int_(index)), device(device), dtype(dtype), sizes(std::move(sizes)), index(index) {}

  std::array<py::object *, 6> parts() {
    return {&path, &launches, &current_device, &current_stream, &enter, &refresh};
  }

  bool takes(const at::Tensor &tensor, at::ScalarType wanted, at::IntArrayRef extent) const {
    return tensor.device() == device && tensor.scalar_type() == wanted && tensor.sizes() == extent &&
        tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % ALIGNMENT == 0;
  }

  py::object operator()(const py::object &first, const py::object &second) {
    py::object out = common(first, second);
    if (out) return out;
    entered.reset();  // the path in Python enters streams itself
    return path(first, second);
  }

  // Returns a fresh output, from x's allocator where that is known: the dispatcher would take twice as long.
  at::Tensor output(const at::Tensor &x) const {
    const at::IntArrayRef extent(sizes);
    c10::Allocator *allocator = x.storage().allocator();
    if (allocator == nullptr) return at::empty(extent, x.options());
    const c10::DispatchKeySet keys(x.options().computeDispatchKey());
    return at::Tensor(at::detail::empty_generic(extent, allocator, keys, dtype, std::nullopt));
  }

  // Returns a null object when the call must take the path in Python.
  py::object common(const py::object &first, const py::object &second) {
    if (!THPVariable_CheckExact(first.ptr()) || !(second.is_none() || THPVariable_CheckExact(second.ptr()))) return {};
    const at::Tensor &x = THPVariable_Unpack(first.ptr());
    const at::Tensor *mask = second.is_none() ? nullptr : &THPVariable_Unpack(second.ptr());
    const at::IntArrayRef extent(sizes);
    if (!takes(x, dtype, extent) || (mask != nullptr && !takes(*mask, at::kBool, extent.slice(0, 2)))) return {};
    const auto launch = py::reinterpret_borrow<py::object>(
        PyDict_GetItemWithError(launches.ptr(), mask == nullptr ? Py_False : Py_True));
    if (!launch || current_device().cast<int>() != index) return {};
    const py::object stream = current_stream(number);
    const auto handle = stream.cast<uintptr_t>();
    if (entered != handle) {
      entered.reset();
      if (enter(stream).cast<bool>()) entered = handle;
    }
    at::Tensor out;
    try {
      py::gil_scoped_release unlocked;
      out = output(x);
    } catch (const c10::OutOfMemoryError &) {
      return {};  // the path in Python raises torch's own error
    }
    py::object result;
    const auto wrapped = [&] {
      if (!result) result = py::reinterpret_steal<py::object>(THPVariable_Wrap(out));
      return result;
    };
    const auto submit = [&] {
      if (py::isinstance<Launcher>(launch))
        launch.cast<const Launcher *>()->launch(handle, x, mask, out);
      else
        launch(stream, first, second, wrapped());
    };
    submit();
    // The device works during the check of the weights. In the rare case of a change the call is launched again. Where
    // the weights do not fit the kernel's number type, the path in Python takes the call.
    const int found = refresh().cast<int>();
    if (found == UNFIT) return {};
    if (found != UNCHANGED) submit();
    return wrapped();
  }
};

// Returns an object's C++ value, or null when its constructor has not run.
template <typename T>
T *built(PyObject *object) {
  auto place = reinterpret_cast<py::detail::instance *>(object)->get_value_and_holder();
  return place.holder_constructed() ? place.template value_ptr<T>() : nullptr;
}

// Shows Python's garbage collector what an object holds: a model may hold the forward that was built from it.
template <typename T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject *type) {
    type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->ht_type.tp_traverse = [](PyObject *object, visitproc visit, void *arg) -> int {
      Py_VISIT(Py_TYPE(object));
      if (T *self = built<T>(object))
        for (const py::object *part : self->parts()) Py_VISIT(part->ptr());
      return 0;
    };
    type->ht_type.tp_clear = [](PyObject *object) -> int {
      if (T *self = built<T>(object))
        for (py::object *part : self->parts()) *part = py::none();
      return 0;
    };
  });
}

// Compares a module's parts, parameters and settings with those it was made with, by identity, and reads the state of
// its tensors' memory. The lists and tuples that hold the objects are kept, so that plain pointers stay valid.
struct Watch {
  struct Setting {
    PyObject *owner, *name, *value;  // value is null where the owner has none
  };
  std::vector<std::pair<PyObject *, PyObject *>> types;
  std::vector<std::pair<PyObject *, Py_ssize_t>> counts;
  std::vector<std::pair<PyObject *, Py_ssize_t>> filled;
  std::vector<PyObject *> contents, tensors;
  std::vector<Setting> settings;
  mutable std::vector<uint64_t> tags;
  py::object held;

  Watch(
      const py::list &modules, const py::list &kinds, const py::list &counted, const std::vector<Py_ssize_t> &sizes,
      const py::list &filled, const py::list &contents, const py::list &named, const py::list &tensors)
      : held(py::make_tuple(modules, kinds, counted, filled, contents, named, tensors)) {
    for (size_t i = 0; i < modules.size(); i++) types.emplace_back(item(modules, i), item(kinds, i));
    for (size_t i = 0; i < counted.size(); i++) counts.emplace_back(item(counted, i), sizes.at(i));
    for (size_t i = 0; i < filled.size(); i++)
      if (const Py_ssize_t size = PyDict_Size(item(filled, i))) this->filled.emplace_back(item(filled, i), size);
    for (size_t i = 0; i < contents.size(); i++) this->contents.push_back(item(contents, i));
    for (size_t i = 0; i < named.size(); i++) {
      PyObject *entry = item(named, i);
      PyObject *value = PyTuple_GetItem(entry, 2);
      settings.push_back({PyTuple_GetItem(entry, 0), PyTuple_GetItem(entry, 1), value});
    }
    for (size_t i = 0; i < tensors.size(); i++) {
      if (!THPVariable_Check(item(tensors, i))) throw py::type_error("expected a list of tensors");
      this->tensors.push_back(item(tensors, i));
    }
  }

  static PyObject *item(const py::list &list, size_t index) { return PyList_GetItem(list.ptr(), index); }

  std::array<py::object *, 1> parts() { return {&held}; }

// Python 3.11 and 3.12 number the changes of every dictionary: one load tells that nothing was changed in it.
#if PY_VERSION_HEX < 0x030D0000
  bool untouched() const {
    if (tags.empty()) return false;
    for (size_t i = 0; i < counts.size(); i++)
      if (tag(counts[i].first) != tags[i]) return false;
    return true;
  }

  void note_untouched() const {
    tags.clear();
    for (const auto &[owner, count] : counts) tags.push_back(tag(owner));
  }

  static uint64_t tag(PyObject *owner) { return reinterpret_cast<PyDictObject *>(owner)->ma_version_tag; }
#else
  bool untouched() const { return false; }

  void note_untouched() const {}
#endif

  bool same() const {
    for (const auto &[module, kind] : types)
      if (reinterpret_cast<PyObject *>(Py_TYPE(module)) != kind) return false;
    if (untouched()) return true;
    if (!same_contents()) return false;
    note_untouched();
    return true;
  }

  bool same_contents() const {
    for (const auto &[owner, count] : counts)
      if (PyDict_GET_SIZE(owner) != count) return false;
    PyObject *const *expected = contents.data();
    for (const auto &[owner, size] : filled) {
      Py_ssize_t position = 0;
      PyObject *value = nullptr;
      for (Py_ssize_t i = 0; i < size; i++)
        if (!PyDict_Next(owner, &position, nullptr, &value) || *expected++ != value) return false;
    }
    for (const Setting &setting : settings) {
      PyObject *value = PyDict_GetItemWithError(setting.owner, setting.name);
      if ((value == nullptr ? Py_None : value) != setting.value) return false;
    }
    return true;
  }

  // Returns a number that changes with the versions, addresses and strides of the tensors, or nothing when an object
  // is another one.
  std::optional<uint64_t> sign() const {
    if (!same()) return std::nullopt;
    uint64_t total = 0;
    const auto mix = [&](uint64_t value) { total = (std::rotl(total, 23) ^ value) * 0x9E3779B97F4A7C15; };
    for (PyObject *tensor : tensors) {
      const c10::TensorImpl *impl = THPVariable_Unpack(tensor).unsafeGetTensorImpl();
      // The first stride tells a matrix from its transpose.
      const uint64_t stride = impl->dim() > 0 ? impl->strides()[0] : 0;
      mix(impl->version_counter().current_version() ^ stride << 32);
      mix(impl->has_storage() ? reinterpret_cast<uintptr_t>(impl->storage().data()) + impl->storage_offset() : 0);
    }
    return total;
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Launcher>(module, "Launcher", py::module_local(), collected<Launcher>())
      .def(py::init<
           uintptr_t, uintptr_t, unsigned, unsigned, unsigned, std::vector<uint64_t>, py::object, py::object>())
      .def("__call__", [](const Launcher &self, uintptr_t stream, const at::Tensor &x,
                          const std::optional<at::Tensor> &mask, const at::Tensor &out) {
        self.launch(stream, x, mask ? &*mask : nullptr, out);
      });
  py::class_<Call>(module, "Call", py::module_local(), collected<Call>())
      .def(py::init<
           py::object, py::dict, py::object, py::object, py::object, py::object, at::Device, int, at::ScalarType,
           std::vector<int64_t>>())
      .def("__call__", &Call::operator(), py::arg("x"), py::arg("mask") = py::none());
  py::class_<Watch>(module, "Watch", py::module_local(), collected<Watch>())
      .def(py::init<
           py::list, py::list, py::list, std::vector<Py_ssize_t>, py::list, py::list, py::list, py::list>())
      .def("sign", &Watch::sign);
}
