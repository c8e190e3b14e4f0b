#pragma once

// The on-use guard: sees the inputs of each operation before it runs, and has
// closed views among them brought back. It is what lets an unmodified C++ module,
// and a weight used outside its module, wait for a parameter.

namespace zero::autograd {

// The guard is on while anybody wants it: `on` and off calls are counted over all
// engines of the process. Off, it costs nothing.
void want_use_guard(bool on);

} // namespace zero::autograd
