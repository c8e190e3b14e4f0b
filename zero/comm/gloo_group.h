#pragma once

// The one place that makes Gloo groups. make_gloo_group (init.h) gives the user
// a whole c10d::ProcessGroup; communicators take the bare backend.

#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
} // namespace c10d

namespace zero::comm {

// Collective. The prefix under which the n-th group that this rank makes at
// `store` meets the n-th of every other rank: counted in the store itself, so
// that it holds for ranks that are processes and for ranks that are threads.
std::string next_prefix(c10d::Store& store, const std::string& name, int64_t rank);

// Collective. A Gloo backend over `store`, which must be new to it (a prefix of
// its own). Throws c10::DistBackendError that names the ranks that did not come.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t size,
    double timeout_seconds);

} // namespace zero::comm
