/* libnvidia-ml.so.1: processes, memory and utilization. */
#define _GNU_SOURCE
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static const unsigned long long MIB = 1 << 20, NOT_AVAILABLE = ~0ull;

struct listing {
    enum kind kind;
    unsigned count;
    struct process processes[2 * PROCESSES];
};

static void add_process(void *to, struct process process) {
    struct listing *listing = to;
    if (process.kind != listing->kind || process.is_unlisted) return;
    if (process.until_dead && !is_alive(process.pid)) return;
    if (listing->count == sizeof listing->processes / sizeof *listing->processes) give_up("too many processes");
    listing->processes[listing->count++] = process;
}

/* List the processes of a kind on a device. The next call overwrites the list. */
static const struct listing *list(const struct device *device, enum kind kind) {
    static struct listing listing;  /* the caller holds the lock */
    listing.kind = kind;
    listing.count = 0;
    const struct process *first = &machine->processes[device->first_process];
    for (int i = 0; i < device->processes_count; i++) add_process(&listing, first[i]);
    if (kind == COMPUTE) each_context(device->uuid, add_process, &listing);
    return &listing;
}

static unsigned long long used_bytes(const struct subject *it) {
    enum { NOBODY = 0 };
    return used_mib(it->place, NOBODY) * MIB;
}

struct memory_v1 {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static unsigned long long left(unsigned long long total, unsigned long long used) {
    return used < total ? total - used : 0;
}

/* Version 1 has no field for the driver's reserve, so it counts as used. */
static int memory_v1(const struct subject *it, struct memory_v1 *memory) {
    if (!memory) return INVALID_ARGUMENT;
    if (it->device->memory_mib == NONE) return NOT_SUPPORTED;
    memory->total = it->device->memory_mib * MIB;
    memory->used = used_bytes(it) + it->device->reserved_mib * MIB;
    memory->free = left(memory->total, memory->used);
    return SUCCESS;
}

static int memory_v2(const struct subject *it, struct memory_v2 *memory) {
    enum { VERSION = sizeof *memory | 2 << 24 };
    if (!memory) return INVALID_ARGUMENT;
    if (memory->version != VERSION) return ARGUMENT_VERSION_MISMATCH;
    if (it->device->memory_mib == NONE) return NOT_SUPPORTED;
    bool is_limited = it->device->limit_mib;  /* the answer is the control group's, which uses no memory */
    memory->total = (is_limited ? it->device->limit_mib : it->device->memory_mib) * MIB;
    memory->reserved = it->device->reserved_mib * MIB;
    memory->used = is_limited ? 0 : used_bytes(it);
    memory->free = left(memory->total, memory->used + memory->reserved);
    return SUCCESS;
}

struct memory_limits {
    const char *group;
    unsigned long long soft, hard, used;
};

static int memory_limits(const struct subject *it, struct memory_limits *limits) {
    const unsigned long long no_limit = ~0ull;
    if (!limits || !limits->group || strncmp(limits->group, "/sys/fs/cgroup/", 15)) return INVALID_ARGUMENT;
    limits->soft = limits->used = 0;
    limits->hard = it->device->limit_mib ? it->device->limit_mib * MIB : no_limit;
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetMemoryLimits_v1, (handle_t device, struct memory_limits *limits), memory_limits(&it, limits))
DEVICE_CALL(nvmlDeviceGetMemoryInfo, (handle_t device, struct memory_v1 *memory), memory_v1(&it, memory))
DEVICE_CALL(nvmlDeviceGetMemoryInfo_v2, (handle_t device, struct memory_v2 *memory), memory_v2(&it, memory))

struct process_v1 {
    unsigned pid;
    unsigned long long used;
};

struct process_v2 {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* Drivers 535.43 to 535.98 write this larger entry in version 3, although the headers declare that of version 2. */
struct process_v3_of_535 {
    struct process_v2 declared;
    unsigned long long protected_bytes;
};

static bool has_larger_entries(void) {
    int major = 0, minor = 0;
    sscanf(machine->driver, "%d.%d", &major, &minor);
    return major == 535 && minor >= 43 && minor < 98;
}

enum layout { V1, V2, V3 };

static void put_process(const struct subject *it, const struct process *from, enum layout layout, void *to, int i) {
    unsigned long long used = from->mib == NONE ? NOT_AVAILABLE : from->mib * MIB;
    struct process_v2 whole = {from->pid, used, it->device->gpu_instance, it->device->compute_instance};
    if (layout == V1) ((struct process_v1 *)to)[i] = (struct process_v1){from->pid, used};
    else if (layout == V3 && has_larger_entries())
        ((struct process_v3_of_535 *)to)[i] = (struct process_v3_of_535){whole, 0};
    else ((struct process_v2 *)to)[i] = whole;
}

/* The real driver asks for more room than necessary; this one is exact, except for larger entries. */
static int processes(const struct subject *it, enum kind kind, enum layout layout, unsigned *count, void *to) {
    if (!count) return INVALID_ARGUMENT;
    if (is_split(it)) return NO_PERMISSION;
    const struct listing *listing = list(it->device, kind);
    unsigned room = *count;
    *count = listing->count;
    if (room < listing->count) return INSUFFICIENT_SIZE;
    if (layout == V3 && has_larger_entries() && room < 2 * listing->count) return INSUFFICIENT_SIZE;
    if (listing->count && !to) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < listing->count; i++) put_process(it, &listing->processes[i], layout, to, i);
    return SUCCESS;
}

#define PROCESS_CALLS(function, kind)                                                                          \
    DEVICE_CALL(function, (handle_t device, unsigned *count, void *to), processes(&it, kind, V1, count, to))   \
    DEVICE_CALL(function##_v2, (handle_t device, unsigned *count, void *to), processes(&it, kind, V2, count, to)) \
    DEVICE_CALL(function##_v3, (handle_t device, unsigned *count, void *to), processes(&it, kind, V3, count, to))

PROCESS_CALLS(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
PROCESS_CALLS(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)
PROCESS_CALLS(nvmlDeviceGetMPSComputeRunningProcesses, MPS)

struct process_details {
    unsigned version, mode, count;
    struct process_v3_of_535 *to;
};

/* Only Hopper and newer GPUs list the details. */
static int process_details(const struct subject *it, struct process_details *details) {
    enum { VERSION = sizeof *details | 1 << 24, HOPPER = 9 };
    static const enum kind kinds[] = {COMPUTE, GRAPHICS, MPS};
    if (!details) return INVALID_ARGUMENT;
    if (details->version != VERSION) return ARGUMENT_VERSION_MISMATCH;
    if (it->gpu->major_capability < HOPPER) return NOT_SUPPORTED;
    if (details->mode >= sizeof kinds / sizeof *kinds) return INVALID_ARGUMENT;
    if (is_split(it)) return NO_PERMISSION;
    const struct listing *listing = list(it->device, kinds[details->mode]);
    unsigned room = details->to ? details->count : 0;
    details->count = listing->count;
    if (room < listing->count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < listing->count; i++) {
        details->to[i].protected_bytes = 0;
        put_process(it, &listing->processes[i], V2, &details->to[i].declared, 0);
    }
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetRunningProcessDetailList, (handle_t device, struct process_details *details),
            process_details(&it, details))

struct utilisation {
    unsigned gpu, memory;
};

static int utilisation(const struct subject *it, struct utilisation *rates) {
    if (!rates) return INVALID_ARGUMENT;
    if (it->is_instance || is_split(it) || it->gpu->utilisation == NONE) return NOT_SUPPORTED;
    rates->gpu = rates->memory = it->gpu->utilisation;
    return SUCCESS;
}

/* Return a percentage and the sampling period in microseconds. */
static int coder_utilisation(const struct subject *it, unsigned *percent, unsigned *period_us) {
    if (!percent || !period_us) return INVALID_ARGUMENT;
    if (it->is_instance || is_split(it)) return NOT_SUPPORTED;
    *percent = 0;
    *period_us = 167000;
    return SUCCESS;
}

struct sample {
    unsigned pid;
    unsigned long long time_us;
    unsigned gpu, memory, encoder, decoder;
};

/* The current time on the clock of the samples, in microseconds. */
static unsigned long long sample_clock_us(int samples) {
    struct timespec now;
    clock_gettime(samples == MONOTONIC ? CLOCK_MONOTONIC : samples == BOOT || samples == OFFSET ? CLOCK_BOOTTIME
                                                                                               : CLOCK_REALTIME, &now);
    unsigned long long us = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
    return samples == OFFSET ? us - 600 * 1000000ull : samples == STRANGE ? us * 1000 : us;
}

/* Return the average use since a time in microseconds, at most over the last 15 s, in percent. */
static unsigned average(const struct gpu *gpu, unsigned long long since_us, unsigned long long now_us) {
    const unsigned long long second = 1000000, kept = 15 * second, worked = 10 * second;
    if (gpu->samples == RUBBISH) return 4294000000u;
    if (gpu->use_ended_s == NONE) return gpu->utilisation;
    unsigned long long period = now_us - since_us < kept ? now_us - since_us : kept;
    unsigned long long idle = gpu->use_ended_s * second;
    unsigned long long work = period > idle ? period - idle : 0;
    return 100 * (work < worked ? work : worked) / period;
}

/* Return an entry for each process since a time in microseconds, at most for the last 15 s, like driver 580 on an H100.
   All processes computed at the same times. */
static int samples(const struct subject *it, struct sample *to, unsigned *count, unsigned long long since_us) {
    if (!count) return INVALID_ARGUMENT;
    if (it->is_instance || is_split(it) || it->gpu->utilisation == NONE) return NOT_SUPPORTED;
    if (it->gpu->samples == EMPTY) return *count = 0, SUCCESS;
    unsigned long long now_us = sample_clock_us(it->gpu->samples);
    bool is_used = it->gpu->utilisation || it->gpu->use_ended_s != NONE;
    const struct listing *listing = list(it->device, COMPUTE);
    unsigned room = *count, found = is_used && now_us > since_us ? listing->count : 0;
    *count = found;
    if (!found) return NOT_FOUND;
    if (!to || room < found) return INSUFFICIENT_SIZE;
    unsigned gpu = average(it->gpu, since_us, now_us);
    for (unsigned i = 0; i < found; i++)
        to[i] = (struct sample){listing->processes[i].pid, now_us, gpu, 0, 0, 0};
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetUtilizationRates, (handle_t device, struct utilisation *rates), utilisation(&it, rates))
DEVICE_CALL(nvmlDeviceGetEncoderUtilization, (handle_t device, unsigned *percent, unsigned *period_us),
            coder_utilisation(&it, percent, period_us))
DEVICE_CALL(nvmlDeviceGetDecoderUtilization, (handle_t device, unsigned *percent, unsigned *period_us),
            coder_utilisation(&it, percent, period_us))
DEVICE_CALL(nvmlDeviceGetProcessUtilization,
            (handle_t device, struct sample *to, unsigned *count, unsigned long long since_us),
            samples(&it, to, count, since_us))
