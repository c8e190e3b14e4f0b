#pragma once

// Catch2 is one header in version 2 and many in version 3. Use REQUIRE: torch's
// logging has a CHECK of its own, which takes the place of Catch's.

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
