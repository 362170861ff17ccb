/* The devices that CUDA enumerates for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. */
#ifndef STAND_IN_VISIBLE_H
#define STAND_IN_VISIBLE_H

#include "scenario.h"

enum { ORDINALS = GPUS * (1 + SLOTS) };

/* Fill `into`, an array of ORDINALS places, in CUDA's order for these values of the two variables (NULL if unset).
 * Return the number of devices. A machine must be loaded. */
int visible_devices(const char *visible, const char *order, struct place *into);

#endif
