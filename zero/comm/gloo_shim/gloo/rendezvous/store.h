#pragma once

// See [Note: gloo shim] in gloo/algorithm.h. The virtual functions stand in the
// order of the vtable in libtorch_cpu, so that a GlooStore made here would work.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#define GLOO_STORE_HAS_STORE_V2

namespace gloo {

class IStore {
 public:
  virtual ~IStore() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual std::vector<char> wait_get(
      const std::string& key,
      const std::chrono::milliseconds& timeout) {
    wait({key}, timeout);
    return get(key);
  }
  virtual void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) = 0;
  virtual bool has_v2_support() = 0;
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string>& keys) = 0;
  virtual void multi_set(
      const std::vector<std::string>& keys,
      const std::vector<std::vector<char>>& values) = 0;
  virtual void append(const std::string& key, const std::vector<char>& value) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
};

namespace rendezvous {

class Store : public IStore {
 public:
  using IStore::wait;
  virtual void wait(const std::vector<std::string>& keys) = 0;
};

} // namespace rendezvous
} // namespace gloo
