#pragma once

// Everything that a program needs: #include <zero/zero.h>, link zero::zero.

#include <zero/checkpoint/checkpoint.h>
#include <zero/comm/groups.h>
#include <zero/comm/init.h>
#include <zero/optim/ema.h>
#include <zero/optim/join.h>
#include <zero/optim/loss_scaler.h>
#include <zero/optim/sharder.h>
#include <zero/optim/zero_optimizer.h>
#include <zero/options.h>
