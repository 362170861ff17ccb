/* libnvidia-ml.so.1: handles, entering and leaving calls, library and system calls, finding devices. */
#define _GNU_SOURCE
#include "nvml.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int init_count;

/* ---- handles ----------------------------------------------------------------------------- */

/* A handle is the address of a byte in this table. Index 0 of a row is the whole GPU. */
static const char handles[GPUS][1 + SLOTS];

static handle_t to_handle(struct place place) { return &handles[place.gpu][1 + place.slot]; }

struct place place_of(handle_t handle) {
    if (handle < &handles[0][0] || handle >= &handles[0][0] + sizeof handles) return (struct place){NONE, NONE};
    int offset = handle - &handles[0][0];
    return (struct place){offset / (1 + SLOTS), offset % (1 + SLOTS) - 1};
}

int give_handle(struct place place, handle_t *device) {
    if (!device) return INVALID_ARGUMENT;
    *device = to_handle(place);
    return SUCCESS;
}

/* ---- entering and leaving calls ---------------------------------------------------------- */

int leave(int answer) {
    leave_call();
    return answer;
}

/* Return the error that prevents the call, or 0. The caller holds the lock. */
int obstacle(const char *function, struct place place) {
    int code = obey_rules(function, place);
    if (!init_count) return UNINITIALIZED;
    if (code) return code;
    return machine ? SUCCESS : DRIVER_NOT_LOADED;
}

int find_subject(handle_t handle, struct subject *it) {
    it->place = place_of(handle);
    it->device = device_at(it->place);
    it->is_instance = it->place.slot >= 0;
    if (it->place.gpu < 0) return INVALID_ARGUMENT;
    if (!it->device) return it->is_instance ? INVALID_ARGUMENT : GPU_IS_LOST;  /* the device existed before */
    it->gpu = &machine->gpus[it->place.gpu];
    return SUCCESS;
}

int enter(const char *function, handle_t handle, struct subject *it) {
    enter_call();
    int code = obstacle(function, place_of(handle));
    if (!code) code = find_subject(handle, it);
    return code ? leave(code) : SUCCESS;
}

int text(const char *from, char *to, unsigned length) {
    if (!to) return INVALID_ARGUMENT;
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int number(int from, unsigned *to) {
    if (!to) return INVALID_ARGUMENT;
    if (from == NONE) return NOT_SUPPORTED;
    *to = from;
    return SUCCESS;
}

bool is_split(const struct subject *it) { return !it->is_instance && it->gpu->mig == MIG_ON; }

/* ---- library and system ------------------------------------------------------------------ */

static int start(const char *function) {
    enter_call();
    int code = obey_rules(function, (struct place){NONE, NONE});
    if (!code && !machine) code = DRIVER_NOT_LOADED;
    if (!code) init_count++;
    return leave(code);
}

EXPORT int nvmlInit(void) { return start(__func__); }
EXPORT int nvmlInit_v2(void) { return start(__func__); }
EXPORT int nvmlInitWithFlags(unsigned flags) { return (void)flags, start(__func__); }
SYSTEM_CALL(nvmlShutdown, (void), (init_count--, SUCCESS))

/* This call works without initialization, as in the real library. */
EXPORT const char *nvmlErrorString(int code) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires restart",
        "The operating system has blocked the request", "Driver/library version mismatch", "In use",
        "Insufficient Memory", "No data", "ECC not supported in vGPU mode", "Insufficient resources",
        "Frequency not supported", "Argument version mismatch", "Deprecated", "Not ready", "GPU not found",
        "Invalid state"};
    enter_call();
    obey_rules(__func__, (struct place){NONE, NONE});
    leave_call();
    return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "Unknown Error";
}

/* NVML's version is CUDA's major version followed by the driver's version. */
static int nvml_version(char *version, unsigned length) {
    char whole[TEXT + 16];
    snprintf(whole, sizeof whole, "%d.%s", machine->cuda / 1000, machine->driver);
    return text(whole, version, length);
}

SYSTEM_CALL(nvmlSystemGetDriverVersion, (char *version, unsigned length), text(machine->driver, version, length))
SYSTEM_CALL(nvmlSystemGetNVMLVersion, (char *version, unsigned length), nvml_version(version, length))
SYSTEM_CALL(nvmlSystemGetCudaDriverVersion, (unsigned *version), number(machine->cuda, version))
SYSTEM_CALL(nvmlSystemGetCudaDriverVersion_v2, (unsigned *version), number(machine->cuda, version))

static int process_name(unsigned pid, char *name, unsigned length) {
    char path[40], command[1024];
    if (!name || !length) return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NOT_FOUND;
    ssize_t got = read(file, command, sizeof command - 1);
    close(file);
    command[got < 0 ? 0 : got] = '\0';  /* the command line up to its first NUL */
    snprintf(name, length, "%s", command);
    return SUCCESS;
}

SYSTEM_CALL(nvmlSystemGetProcessName, (unsigned pid, char *name, unsigned length), process_name(pid, name, length))

/* ---- confidential computing -------------------------------------------------------------- */

/* Protected PCIe is reported as a mode of several GPUs, with the feature itself off. */
static bool is_feature_on(void) { return machine->conf_compute == CONF_ON; }
static bool has_protected_pcie(void) { return machine->conf_compute == CONF_PROTECTED_PCIE; }
static bool has_conf_compute(void) { return machine->conf_compute != CONF_NONE; }

struct conf_compute_capabilities {
    unsigned cpu, gpus;
};

static int conf_compute_capabilities(struct conf_compute_capabilities *to) {
    if (!to) return INVALID_ARGUMENT;
    *to = (struct conf_compute_capabilities){0, has_conf_compute()};
    return SUCCESS;
}

struct conf_compute_state {
    unsigned environment, feature, developer_tools;
};

static int conf_compute_state(struct conf_compute_state *to) {
    enum { UNAVAILABLE = 0, PRODUCTION = 2 };
    bool is_on = is_feature_on() || has_protected_pcie();
    if (!has_conf_compute()) return NOT_SUPPORTED;
    if (!to) return INVALID_ARGUMENT;
    *to = (struct conf_compute_state){is_on ? PRODUCTION : UNAVAILABLE, is_feature_on(), 0};
    return SUCCESS;
}

struct conf_compute_settings {
    unsigned version;
    struct conf_compute_state state;
    unsigned multi_gpu_mode;
};

static int conf_compute_settings(struct conf_compute_settings *to) {
    enum { VERSION = sizeof *to | 1 << 24 };
    if (!has_conf_compute()) return NOT_SUPPORTED;
    if (!to) return INVALID_ARGUMENT;
    if (to->version != VERSION) return ARGUMENT_VERSION_MISMATCH;
    to->multi_gpu_mode = has_protected_pcie();
    return conf_compute_state(&to->state);
}

struct conf_compute_memory {
    unsigned long long protected_kib, unprotected_kib;
};

/* Nothing is protected while the feature is off, even on a GPU that does not support it. */
static int conf_compute_memory(const struct device *device, struct conf_compute_memory *to) {
    if (!to) return INVALID_ARGUMENT;
    bool is_protected = is_feature_on() && device->memory_mib != NONE;
    *to = (struct conf_compute_memory){is_protected ? device->memory_mib * 1024ull : 0, 0};
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetConfComputeMemSizeInfo, (handle_t device, struct conf_compute_memory *memory),
            conf_compute_memory(it.device, memory))
SYSTEM_CALL(nvmlSystemGetConfComputeCapabilities, (struct conf_compute_capabilities *capabilities),
            conf_compute_capabilities(capabilities))
SYSTEM_CALL(nvmlSystemGetConfComputeState, (struct conf_compute_state *state), conf_compute_state(state))
SYSTEM_CALL(nvmlSystemGetConfComputeSettings, (struct conf_compute_settings *settings),
            conf_compute_settings(settings))
SYSTEM_CALL(nvmlSystemGetConfComputeGpusReadyState, (unsigned *ready),
            has_conf_compute() ? number(machine->conf_compute_ready, ready) : NOT_SUPPORTED)

/* ---- finding devices --------------------------------------------------------------------- */

static int gpus_count(void) { return machine->count == NONE ? machine->gpus_count : machine->count; }

SYSTEM_CALL(nvmlDeviceGetCount, (unsigned *count), number(gpus_count(), count))
SYSTEM_CALL(nvmlDeviceGetCount_v2, (unsigned *count), number(gpus_count(), count))

/* A GPU that is counted but not described is one that this user has no permission to open. */
static int by_index(const char *function, unsigned index, handle_t *device) {
    struct place place = {index < GPUS ? (int)index : NONE, NONE};
    enter_call();
    int code = obstacle(function, place);
    if (!code && index >= (unsigned)gpus_count()) code = INVALID_ARGUMENT;
    if (!code && !device_at(place)) code = NO_PERMISSION;
    return leave(code ? code : give_handle(place, device));
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, handle_t *device) { return by_index(__func__, index, device); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *device) { return by_index(__func__, index, device); }

typedef bool matcher_t(struct place place, const void *wanted);

static struct place find_place(matcher_t *matches, const void *wanted) {
    for (int gpu = 0; machine && wanted && gpu < machine->gpus_count; gpu++)
        for (int slot = NONE; slot < SLOTS; slot++) {
            struct place place = {gpu, slot};
            if (device_at(place) && matches(place, wanted)) return place;
        }
    return (struct place){NONE, NONE};
}

static int by_search(const char *function, matcher_t *matches, const void *wanted, handle_t *device) {
    enter_call();
    struct place place = find_place(matches, wanted);
    int code = obstacle(function, place);
    if (!code && !wanted) code = INVALID_ARGUMENT;
    if (!code && (place = find_place(matches, wanted)).gpu < 0) code = NOT_FOUND;  /* the call may have waited */
    return leave(code ? code : give_handle(place, device));
}

static bool has_uuid(struct place place, const void *uuid) { return !strcmp(device_at(place)->uuid, uuid); }

static bool has_bus(struct place place, const void *text) {
    unsigned domain, bus, slot, function = 0;
    const struct gpu *gpu = &machine->gpus[place.gpu];
    if (sscanf(text, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) return false;
    return gpu->domain == domain && gpu->bus == bus && gpu->slot == slot && gpu->function == function;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *device) {
    return by_search(__func__, has_uuid, uuid, device);
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char *bus, handle_t *device) {
    return by_search(__func__, has_bus, bus, device);
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, handle_t *device) {
    return by_search(__func__, has_bus, bus, device);
}
