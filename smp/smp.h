// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The whole public interface. See docs/api.md.

#include "smp/activation_checkpointing.h"
#include "smp/amp.h"
#include "smp/autocast.h"
#include "smp/clip_grad.h"
#include "smp/config.h"
#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"
#include "smp/error.h"
#include "smp/group.h"
#include "smp/init.h"
#include "smp/keyed_random.h"
#include "smp/leaf.h"
#include "smp/loss_scale_options.h"
#include "smp/model_creation.h"
#include "smp/objects.h"
#include "smp/partition_scope.h"
#include "smp/pretrained.h"
#include "smp/save_load.h"
#include "smp/scheduler.h"
#include "smp/step.h"
#include "smp/step_output.h"
#include "smp/tensor_parallelism.h"
#include "smp/tp_register.h"
#include "smp/version.h"
