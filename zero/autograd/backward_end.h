#pragma once

// When a backward ends: after the outermost graph task that is running now (a
// checkpoint runs a backward inside a backward), or never, when it raises.

#include <functional>

namespace zero::autograd {

// Called inside a backward. Exactly one of the two is called later: `on_end` on
// the thread of the outermost backward when it has finished, or `on_loss` (which
// must not throw nor block) when its graph task is destroyed without finishing.
void at_end_of_backward(std::function<void()> on_end, std::function<void()> on_loss);

// Whether this thread is inside a backward.
bool inside_backward();

} // namespace zero::autograd
