#pragma once

// See [Note: gloo shim] in gloo/algorithm.h.

namespace gloo::transport {

class Device;
class UnboundBuffer;

} // namespace gloo::transport
