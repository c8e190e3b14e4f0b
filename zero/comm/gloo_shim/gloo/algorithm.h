#pragma once

// [Note: gloo shim] torch's wheels carry Gloo's code but none of its headers,
// and ProcessGroupGloo.hpp includes five of them. The files in this folder
// declare what that header names and nothing more. Only zero/comm/gloo_group.cpp
// sees them; they are not installed.
