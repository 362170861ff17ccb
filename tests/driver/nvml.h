/* Helpers for every NVML call. Prototypes match NVIDIA's nvml.h. */
#ifndef STAND_IN_NVML_H
#define STAND_IN_NVML_H

#include "scenario.h"

enum answer {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25,
};

typedef const char *handle_t;

/* The device that a call refers to. */
struct subject {
    struct place place;
    const struct gpu *gpu;
    const struct device *device;
    bool is_instance;
};

/* Return the place of a handle, or NOWHERE if the handle is invalid. */
struct place place_of(handle_t handle);
int give_handle(struct place place, handle_t *device);
int find_subject(handle_t handle, struct subject *it);

/* Take the lock, apply the rules and find the device. Return 0, or an error without the lock. */
int enter(const char *function, handle_t handle, struct subject *it);
/* Return the error that prevents the call, or 0. Call it after enter_call. */
int obstacle(const char *function, struct place place);
/* Release the lock and return the answer. */
int leave(int answer);

/* A call about one device. The expression `answer` can use it as `it`. */
#define DEVICE_CALL(function, parameters, answer)             \
    EXPORT int function parameters {                          \
        struct subject it;                                    \
        int code = enter(__func__, device, &it);              \
        return code ? code : leave(answer);                   \
    }

/* A call that refers to no device. */
#define SYSTEM_CALL(function, parameters, answer)             \
    EXPORT int function parameters {                          \
        enter_call();                                         \
        int code = obstacle(__func__, (struct place){NONE, NONE}); \
        return leave(code ? code : (answer));                 \
    }

/* Store an answer. Check for NULL, for short buffers, and for NONE, which means "not supported". */
int text(const char *from, char *to, unsigned length);
int number(int from, unsigned *to);

struct pci_v3 {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

int fill_pci_v3(const struct gpu *gpu, struct pci_v3 *info);

/* Return whether this is a GPU that is divided into MIG instances, not an instance. */
bool is_split(const struct subject *it);

#endif
