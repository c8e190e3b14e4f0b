#pragma once

// ZERO_API marks what libzero exports; everything else is hidden.
#define ZERO_API __attribute__((visibility("default")))
