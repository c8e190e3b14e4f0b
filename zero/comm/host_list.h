#pragma once

// Slurm's short form of host lists.

#include <string>
#include <string_view>

namespace zero::comm {

// The first host of "node[01-04,7]-ib,x": "node01-ib". Empty if the list is empty
// or malformed.
std::string first_host(std::string_view list);

} // namespace zero::comm
