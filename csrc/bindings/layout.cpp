// The flat layout, for planning and for property tests.

#include "bindings.h"

#include <pybind11/stl.h>

#include <zero/layout/flat_layout.h>

namespace zero::bindings {

void init_layout(py::module_& module) {
  using namespace layout;
  py::class_<Slot>(module, "Slot", "Where a parameter lies, in elements of its bucket.")
      .def_readonly("bucket", &Slot::bucket)
      .def_readonly("offset", &Slot::offset)
      .def_readonly("numel", &Slot::numel);
  py::class_<Bucket>(module, "Bucket", "What is reduced and gathered at once.")
      .def_readonly("family", &Bucket::family)
      .def_readonly("itemsize", &Bucket::itemsize)
      .def_readonly("parameters", &Bucket::parameters, "Indices, in the order of their offsets.")
      .def_readonly("numel", &Bucket::numel, "Padding included.")
      .def_readonly("shard_numel", &Bucket::shard_numel);
  py::class_<FlatLayout>(module, "FlatLayout", "Which bucket holds which parameter.")
      .def_readonly("slots", &FlatLayout::slots)
      .def_readonly("buckets", &FlatLayout::buckets)
      .def(
          "owned",
          [](const FlatLayout& flat, size_t parameter, int64_t rank) {
            const Slot& slot = flat.slots.at(parameter);
            const Range part = owned(slot, flat.buckets.at(slot.bucket), rank);
            return std::make_pair(part.begin, part.end);
          },
          py::arg("parameter"),
          py::arg("rank"),
          "The part of a parameter that a rank owns: (begin, end) in elements of it.");
  module.def(
      "make_layout",
      [](const std::vector<std::tuple<int64_t, int64_t, int64_t>>& parameters,
         int64_t world_size,
         int64_t bucket_bytes,
         int64_t first_bucket_bytes) {
        std::vector<ParameterSpec> specs;
        for (const auto& [numel, itemsize, family] : parameters) {
          specs.push_back({numel, itemsize, family});
        }
        return make_layout(specs, {world_size, bucket_bytes, first_bucket_bytes});
      },
      py::arg("parameters"),
      py::arg("world_size"),
      py::arg("bucket_bytes"),
      py::arg("first_bucket_bytes"),
      "The layout of (numel, itemsize, family) triples; only one family shares a bucket.\n"
      "Raises ValueError on a size or count out of range.");
}

} // namespace zero::bindings
