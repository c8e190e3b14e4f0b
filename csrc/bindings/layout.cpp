// The flat layout, for planning and for property tests.

#include "bindings.h"

#include <pybind11/stl.h>

#include <zero/layout/flat_layout.h>
#include <zero/layout/units.h>

namespace zero::bindings {
namespace {

void init_units(py::module_& module) {
  using namespace layout;
  py::class_<ModuleSpec>(module, "ModuleSpec", "One module of a tree, for make_units().")
      .def(
          py::init([](std::string name,
                      int64_t parent,
                      std::string type,
                      bool list,
                      bool chosen,
                      std::vector<int64_t> parameters,
                      bool called) {
            return ModuleSpec{
                std::move(name),
                parent,
                std::move(type),
                list,
                chosen,
                std::move(parameters),
                called};
          }),
          py::kw_only(),
          py::arg("name"),
          py::arg("parent"),
          py::arg("type"),
          py::arg("list") = false,
          py::arg("chosen") = false,
          py::arg("parameters") = std::vector<int64_t>{},
          py::arg("called") = true);
  py::class_<UnitLayout>(module, "UnitLayout", "Which modules are gathered together.")
      .def_readonly("names", &UnitLayout::names, "By unit; the first is the root's, ''.")
      .def_readonly("unit_of_parameter", &UnitLayout::unit_of_parameter)
      .def_readonly(
          "unit_of_module",
          &UnitLayout::unit_of_module,
          "By module: the unit whose forward it is, else -1.");
  module.def(
      "make_units",
      [](const std::vector<ModuleSpec>& modules,
         const std::vector<int64_t>& numels,
         bool by_default,
         int64_t min_unit_numel) {
        return make_units(modules, numels, {by_default, min_unit_numel});
      },
      py::arg("modules"),
      py::arg("numels"),
      py::arg("by_default"),
      py::arg("min_unit_numel"),
      "The units of a tree of modules in preorder; numels are the parameters' sizes.\n"
      "by_default: the repeated children of lists; else the chosen modules.\n"
      "Raises ValueError on a parent that does not come first and on an index out of range.");
}

} // namespace

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
  init_units(module);
}

} // namespace zero::bindings
