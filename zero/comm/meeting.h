#pragma once

// Where ranks tell each other something before they have a transport: the c10d
// Store.

#include <cstdint>
#include <string>
#include <vector>

#include <zero/api.h>

namespace c10d {
class Store;
} // namespace c10d

namespace zero::comm {

// Collective. Every rank's text, in rank order. `store` and `name` together must be
// new. Throws c10::DistBackendError that names the ranks that did not come.
ZERO_API std::vector<std::string> tell_all(
    c10d::Store& store,
    const std::string& name,
    int64_t rank,
    int64_t size,
    const std::string& text,
    double timeout_seconds);

} // namespace zero::comm
