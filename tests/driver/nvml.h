/* The frame of every NVML call. Prototypes throughout as in NVIDIA's nvml.h. */
#ifndef STAND_IN_NVML_H
#define STAND_IN_NVML_H

#include "scenario.h"

enum answer {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25,
};

typedef const char *handle_t;

/* Whom a call is about. */
struct subject {
    struct place place;
    const struct gpu *gpu;
    const struct device *device;
    bool is_instance;
};

/* Nowhere for what is no handle of ours. */
struct place place_of(handle_t handle);
int give_handle(struct place place, handle_t *device);
int find_subject(handle_t handle, struct subject *it);

/* Locks, obeys the rules and finds the device; answers what stands in the way, unlocked, or 0. */
int enter(const char *function, handle_t handle, struct subject *it);
/* After enter_call: what stands in the call's way, if anything. */
int obstacle(const char *function, struct place place);
/* Unlocks and passes the answer on. */
int leave(int answer);

/* A call about one device: `answer` sees it as `it`. */
#define DEVICE_CALL(function, parameters, answer)             \
    EXPORT int function parameters {                          \
        struct subject it;                                    \
        int code = enter(__func__, device, &it);              \
        return code ? code : leave(answer);                   \
    }

/* A call about none. */
#define SYSTEM_CALL(function, parameters, answer)             \
    EXPORT int function parameters {                          \
        enter_call();                                         \
        int code = obstacle(__func__, (struct place){NONE, NONE}); \
        return leave(code ? code : (answer));                 \
    }

/* Answers, with the checks that every one needs: NULL, too little room, NONE for "not supported". */
int text(const char *from, char *to, unsigned length);
int number(int from, unsigned *to);

struct pci_v3 {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

int fill_pci_v3(const struct gpu *gpu, struct pci_v3 *info);

/* A GPU that is divided into instances, as opposed to one of those. */
bool is_split(const struct subject *it);

#endif
