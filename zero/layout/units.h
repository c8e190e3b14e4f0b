#pragma once

// Units: which modules are gathered together, and which parameters belong to each.
// Integers and names only; equal arguments give equal units on every rank.

#include <cstdint>
#include <string>
#include <vector>

#include <zero/api.h>

namespace zero::layout {

// One module of a tree, in preorder; the root first.
struct ModuleSpec {
  std::string name; // "" for the root, else "blocks.3"
  int64_t parent = -1;
  std::string type; // name of its class
  bool list = false; // ModuleList, Sequential, ModuleDict: a container of modules
  bool chosen = false; // picked by the user's `units`
  std::vector<int64_t> parameters = {}; // directly held, by index; a tied one in each place
  bool called = true; // has a forward; a ModuleList has none, so is no unit by default
};

struct UnitLayout {
  std::vector<std::string> names; // by unit; the first is the root's, ""
  std::vector<int64_t> unit_of_parameter; // by parameter
  std::vector<int64_t> unit_of_module; // by module: the unit whose forward it is, else -1
};

struct UnitOptions {
  bool by_default = true; // the repeated children of lists; else the chosen modules
  int64_t min_unit_numel = 0;
};

// Unit 0 is the root, and owns what no other unit does; the others are numbered in
// preorder of their first module.
//
// By default, a child of a list is a unit when another child of the list has its
// type and parameters lie below it; a list in a list is opened instead where its
// own children repeat, and where it has no forward, all of them. There are no
// default units inside a default unit. Chosen units may lie inside each other.
//
// A parameter belongs to the innermost unit around the first place that holds it;
// one that is held nowhere, to the root. A unit left without parameters vanishes.
//
// A unit of fewer than `min_unit_numel` elements is merged with the next unit that
// lies directly in the same unit, else with the previous one, inner units first; the
// name is then "first..last". Without such a neighbour the enclosing unit takes the
// parameters and the module is no unit any more.
//
// Throws c10::ValueError on a parent that does not come first, and on an index or a
// size out of range.
ZERO_API UnitLayout make_units(
    const std::vector<ModuleSpec>& modules,
    const std::vector<int64_t>& numels,
    const UnitOptions& options);

} // namespace zero::layout
