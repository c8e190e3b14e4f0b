#pragma once

// Empty: see [Note: gloo shim] in gloo/algorithm.h.
