/* libcuda.so.1: CUDA calls, answered from the scenario. Device memory is host memory. Prototypes match cuda.h. */
#define _GNU_SOURCE
#include "scenario.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "visible.h"

enum answer {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, NOT_SUPPORTED = 801, SYSTEM_NOT_READY = 802,
};

enum { CONTEXTS = 64, MIB = 1 << 20 };

/* A process can have several contexts on one device. The primary context is shared and reference-counted. */
struct context {
    int ordinal, references;
    bool is_primary;
};

struct allocation {
    struct allocation *next;
    int ordinal;
    bool is_managed;
    size_t size;
    _Alignas(256) unsigned char bytes[];           /* the alignment of cuMemAlloc */
};

/* All of this except `current` is protected by the lock of enter_call. */
static pid_t owner;                                /* the process that called cuInit successfully, or 0 */
static struct place ordinals[ORDINALS];
static int ordinals_count;
static struct context contexts[CONTEXTS];
static struct allocation *allocations;
static __thread struct context *current;

/* ---- entering and leaving calls ---------------------------------------------------------- */

static const struct place NOWHERE = {NONE, NONE};

static struct place place_of(int ordinal) {
    return ordinal >= 0 && ordinal < ordinals_count ? ordinals[ordinal] : NOWHERE;
}

static int leave(int answer) {
    leave_call();
    return answer;
}

/* A forked child can't use CUDA if its parent has started it, so CUDA is never initialized in the child. */
static int enter(const char *function, struct place place) {
    enter_call();
    int code = obey_rules(function, place);
    if (owner != getpid()) code = NOT_INITIALIZED;
    return code ? leave(code) : SUCCESS;
}

#define CALL(function, parameters, answer)            \
    EXPORT int function parameters {                  \
        int code = enter(__func__, NOWHERE);          \
        return code ? code : leave(answer);           \
    }

/* A call about the device with the ordinal `device`. The expression `answer` can use the device as `it`. */
#define DEVICE_CALL(function, parameters, answer)     \
    EXPORT int function parameters {                  \
        int code = enter(__func__, place_of(device)); \
        if (code) return code;                        \
        const struct device *it = device_at(place_of(device)); \
        return leave(it ? (answer) : INVALID_DEVICE); \
    }

static int number(int from, int *to) {
    if (!to) return INVALID_VALUE;
    *to = from;
    return SUCCESS;
}

/* ---- library ----------------------------------------------------------------------------- */

static bool accepts_work(void) {
    bool is_confidential = machine->conf_compute == CONF_ON || machine->conf_compute == CONF_PROTECTED_PCIE;
    return !is_confidential || machine->conf_compute_ready;
}

static int start(unsigned flags, const struct place *seen, int count) {
    if (owner) return owner == getpid() ? SUCCESS : NOT_INITIALIZED;
    if (flags) return INVALID_VALUE;
    if (!machine || !count) return NO_DEVICE;
    if (!accepts_work()) return SYSTEM_NOT_READY;
    memcpy(ordinals, seen, sizeof ordinals);
    ordinals_count = count;
    owner = getpid();
    return SUCCESS;
}

/* The environment variables are read before any delay, as in the real library. */
EXPORT int cuInit(unsigned flags) {
    struct place seen[ORDINALS];
    enter_call();
    int count = machine ? visible_devices(getenv("CUDA_VISIBLE_DEVICES"), getenv("CUDA_DEVICE_ORDER"), seen) : 0;
    int code = obey_rules(__func__, NOWHERE);
    return leave(code ? code : start(flags, seen, count));
}

EXPORT int cuDriverGetVersion(int *version) {
    enter_call();
    int code = obey_rules(__func__, NOWHERE);
    return leave(code ? code : number(machine ? machine->cuda : 0, version));
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

enum column { ERROR_NAME, ERROR_TEXT };

static const char *find_error(int code, enum column column) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return column == ERROR_NAME ? errors[i].name : errors[i].text;
    return NULL;
}

static int describe(const char *function, int code, enum column column, const char **to) {
    enter_call();
    int fault = obey_rules(function, NOWHERE);
    leave_call();
    if (fault || !to) return fault ? fault : INVALID_VALUE;
    *to = find_error(code, column);
    return *to ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuGetErrorName(int code, const char **name) { return describe(__func__, code, ERROR_NAME, name); }
EXPORT int cuGetErrorString(int code, const char **text) { return describe(__func__, code, ERROR_TEXT, text); }

/* ---- devices ----------------------------------------------------------------------------- */

static const struct gpu *gpu_of(int ordinal) { return &machine->gpus[place_of(ordinal).gpu]; }

static int text(const char *from, char *to, int length) {
    if (!to || length <= 0) return INVALID_VALUE;
    snprintf(to, length, "%s", from);
    return SUCCESS;
}

static int bus_id(const struct gpu *gpu, char *to, int length) {
    char id[40];
    snprintf(id, sizeof id, "%04X:%02X:%02X.%X", gpu->domain, gpu->bus, gpu->slot, gpu->function);
    return (int)strlen(id) < length ? text(id, to, length) : INVALID_VALUE;
}

/* Parse the 16 bytes after "GPU-" or "MIG-". */
static int uuid_bytes(const char *uuid, unsigned char *to) {
    if (!to) return INVALID_VALUE;
    memset(to, 0, 16);
    const char *digit = strchr(uuid, '-');
    for (int i = 0; digit && i < 16; i++, digit += 2) {
        digit += *digit == '-';
        if (sscanf(digit, "%2hhx", &to[i]) != 1) break;
    }
    return SUCCESS;
}

/* A GPU without dedicated memory reports the host's memory to CUDA. */
static size_t total_bytes(const struct device *device) {
    enum { HOST_MIB = 128 << 10 };
    return (size_t)(device->memory_mib == NONE ? HOST_MIB : device->memory_mib) * MIB;
}

static int total_memory(const struct device *device, size_t *bytes) {
    if (!bytes) return INVALID_VALUE;
    *bytes = total_bytes(device);
    return SUCCESS;
}

static int attribute(const struct gpu *gpu, int which, int *value) {
    switch (which) {
        case 20: return number(gpu->mode, value);
        case 33: return number(gpu->bus, value);
        case 34: return number(gpu->slot, value);
        case 50: return number(gpu->domain, value);
        case 75: return number(gpu->major_capability, value);
        case 76: return number(gpu->minor_capability, value);
        default: return which > 0 ? number(0, value) : INVALID_VALUE;
    }
}

CALL(cuDeviceGetCount, (int *count), number(ordinals_count, count))
CALL(cuDeviceGet, (int *device, int ordinal),
     ordinal < 0 || ordinal >= ordinals_count ? INVALID_DEVICE : number(ordinal, device))
DEVICE_CALL(cuDeviceGetName, (char *name, int length, int device), text(it->name, name, length))
DEVICE_CALL(cuDeviceGetUuid, (unsigned char *uuid, int device), uuid_bytes(gpu_of(device)->whole.uuid, uuid))
DEVICE_CALL(cuDeviceGetUuid_v2, (unsigned char *uuid, int device), uuid_bytes(it->uuid, uuid))
DEVICE_CALL(cuDeviceGetPCIBusId, (char *id, int length, int device), bus_id(gpu_of(device), id, length))
DEVICE_CALL(cuDeviceTotalMem_v2, (size_t *bytes, int device), total_memory(it, bytes))
DEVICE_CALL(cuDeviceGetAttribute, (int *value, int which, int device), attribute(gpu_of(device), which, value))

/* The 32-bit version of the call reports at most 4 GiB. */
static int total_memory_v1(const struct device *device, unsigned *bytes) {
    size_t total = total_bytes(device);
    return number(total > UINT32_MAX ? UINT32_MAX : total, (int *)bytes);
}

DEVICE_CALL(cuDeviceTotalMem, (unsigned *bytes, int device), total_memory_v1(it, bytes))

/* ---- publishing this process's memory use ------------------------------------------------ */

static int contexts_on(int ordinal) {
    int count = 0;
    for (int i = 0; i < CONTEXTS; i++) count += contexts[i].references && contexts[i].ordinal == ordinal;
    return count;
}

static size_t allocated_bytes(int ordinal, bool is_managed) {
    size_t bytes = 0;
    for (struct allocation *it = allocations; it; it = it->next)
        if (it->ordinal == ordinal && it->is_managed == is_managed) bytes += it->size;
    return bytes;
}

/* Round up, because the scenario counts in whole MiB. */
static long to_mib(size_t bytes) { return (bytes + MIB - 1) / MIB; }

static long managed_mib(int ordinal) { return to_mib(allocated_bytes(ordinal, true)); }

static long size_mib(int ordinal) {
    return (long)contexts_on(ordinal) * machine->context_mib + to_mib(allocated_bytes(ordinal, false));
}

static long held_mib(int ordinal) { return size_mib(ordinal) + managed_mib(ordinal); }

static void write_holdings(int file) {
    char line[TEXT + 48];
    for (int ordinal = 0; ordinal < ordinals_count; ordinal++) {
        const struct device *device = device_at(place_of(ordinal));
        if (!device || !contexts_on(ordinal)) continue;
        int length = snprintf(line, sizeof line, "%s %ld %ld\n", device->uuid, size_mib(ordinal), managed_mib(ordinal));
        if (write(file, line, length) != length) give_up("contexts %s: %m", machine->contexts);
    }
}

/* Write to a temporary name and rename, so that readers never see half a file. Readers skip names that aren't pids. */
static void publish(void) {
    char path[PATH + 32], draft[PATH + 40];
    if (!*machine->contexts) return;
    snprintf(path, sizeof path, "%s/%d", machine->contexts, getpid());
    snprintf(draft, sizeof draft, "%s.new", path);
    int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) give_up("contexts %s: %m", machine->contexts);
    write_holdings(file);
    close(file);
    if (rename(draft, path)) give_up("contexts %s: %m", machine->contexts);
}

/* Return the memory that the driver, the scenario and all processes leave free on a device. */
static long free_mib(int ordinal) {
    const struct device *device = device_at(place_of(ordinal));
    if (!device) return 0;
    long used = device->reserved_mib + used_mib(place_of(ordinal), owner) + held_mib(ordinal);
    long total = total_bytes(device) / MIB;
    return used < total ? total - used : 0;
}

/* Hold a lock from reading the free memory until the new use is published. The lock ends with the process. */
static int lock_allocation(void) {
    if (!*machine->contexts) return NONE;
    int folder = open(machine->contexts, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || flock(folder, LOCK_EX)) give_up("contexts %s: %m", machine->contexts);
    return folder;
}

static void publish_and_unlock(int folder) {
    publish();
    if (folder != NONE) close(folder);
}

/* Delete this process's file at exit. Files of killed processes remain, and readers ignore them. */
__attribute__((destructor)) static void tidy(void) {
    char path[PATH + 32];
    if (owner != getpid() || !machine || !*machine->contexts) return;
    snprintf(path, sizeof path, "%s/%d", machine->contexts, getpid());
    unlink(path);
}

/* ---- contexts ---------------------------------------------------------------------------- */

static struct context *find_primary(int ordinal) {
    for (int i = 0; i < CONTEXTS; i++)
        if (contexts[i].references && contexts[i].is_primary && contexts[i].ordinal == ordinal) return &contexts[i];
    return NULL;
}

static struct context *find_unused(void) {
    for (int i = 0; i < CONTEXTS; i++)
        if (!contexts[i].references) return &contexts[i];
    return NULL;
}

static struct context *open_context(int ordinal, bool is_primary) {
    int folder = lock_allocation();
    struct context *fresh = free_mib(ordinal) < machine->context_mib ? NULL : find_unused();
    if (fresh) *fresh = (struct context){ordinal, 1, is_primary};
    publish_and_unlock(folder);
    return fresh;
}

static bool is_open(const struct context *context) {
    return context >= contexts && context < contexts + CONTEXTS && context->references;
}

static void free_allocations(int ordinal) {
    for (struct allocation **it = &allocations; *it;) {
        struct allocation *gone = *it;
        if (gone->ordinal != ordinal) {
            it = &gone->next;
            continue;
        }
        *it = gone->next;
        free(gone);
    }
}

static void release_context(struct context *context) {
    if (--context->references) return;
    if (!contexts_on(context->ordinal)) free_allocations(context->ordinal);
    if (current == context) current = NULL;
    publish();
}

static int retain_primary(struct context **context, int ordinal) {
    if (!context) return INVALID_VALUE;
    struct context *primary = find_primary(ordinal);
    if (primary) primary->references++;
    else primary = open_context(ordinal, true);
    *context = primary;
    return primary ? SUCCESS : OUT_OF_MEMORY;
}

static int release_primary(int ordinal) {
    struct context *primary = find_primary(ordinal);
    if (!primary) return INVALID_CONTEXT;
    release_context(primary);
    return SUCCESS;
}

static int create(struct context **context, int ordinal) {
    if (!context) return INVALID_VALUE;
    *context = open_context(ordinal, false);
    if (*context) current = *context;
    return *context ? SUCCESS : OUT_OF_MEMORY;
}

static int destroy(struct context *context) {
    if (!is_open(context) || context->is_primary) return INVALID_CONTEXT;
    release_context(context);
    return SUCCESS;
}

static int set_current(struct context *context) {
    if (context && !is_open(context)) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

static int get_current(struct context **context) {
    if (!context) return INVALID_VALUE;
    *context = current;
    return SUCCESS;
}

DEVICE_CALL(cuDevicePrimaryCtxRetain, (struct context **context, int device),
            ((void)it, retain_primary(context, device)))
DEVICE_CALL(cuDevicePrimaryCtxRelease, (int device), ((void)it, release_primary(device)))
DEVICE_CALL(cuDevicePrimaryCtxRelease_v2, (int device), ((void)it, release_primary(device)))
DEVICE_CALL(cuCtxCreate_v2, (struct context **context, unsigned flags, int device),
            ((void)flags, create(context, device)))
CALL(cuCtxDestroy_v2, (struct context *context), destroy(context))
CALL(cuCtxSetCurrent, (struct context *context), set_current(context))
CALL(cuCtxGetCurrent, (struct context **context), get_current(context))
CALL(cuCtxSynchronize, (void), is_open(current) ? SUCCESS : INVALID_CONTEXT)

/* ---- memory ------------------------------------------------------------------------------ */

/* A device address is the host address of the bytes that simulate it. */
typedef uintptr_t address_t;

static struct allocation **find_allocation(address_t address) {
    struct allocation **it = &allocations;
    while (*it && (address_t)(*it)->bytes != address) it = &(*it)->next;
    return it;
}

static bool is_inside(address_t address, size_t size) {
    for (struct allocation *it = allocations; it; it = it->next)
        if (address >= (address_t)it->bytes && address - (address_t)it->bytes <= it->size &&
            size <= it->size - (address - (address_t)it->bytes))
            return true;
    return false;
}

static bool fits(size_t size, int ordinal, bool is_managed) {
    size_t before = allocated_bytes(ordinal, is_managed);
    return size <= SIZE_MAX / 2 && to_mib(before + size) - to_mib(before) <= free_mib(ordinal);
}

/* Memory is not cleared, as on a real device, so untouched pages cost the host nothing. */
static struct allocation *allocation_of(size_t size, int ordinal, bool is_managed) {
    if (!fits(size, ordinal, is_managed)) return NULL;
    struct allocation *fresh = aligned_alloc(256, sizeof *fresh + (size + 255) / 256 * 256);
    if (!fresh) return NULL;
    fresh->next = allocations;
    fresh->ordinal = ordinal;
    fresh->is_managed = is_managed;
    fresh->size = size;
    return allocations = fresh;
}

static int allocate(address_t *address, size_t size, bool is_managed) {
    if (!address || !size) return INVALID_VALUE;
    if (!is_open(current)) return INVALID_CONTEXT;
    int folder = lock_allocation();
    struct allocation *fresh = allocation_of(size, current->ordinal, is_managed);
    publish_and_unlock(folder);
    if (!fresh) return OUT_OF_MEMORY;
    *address = (address_t)fresh->bytes;
    return SUCCESS;
}

static int memory_info(size_t *left, size_t *total) {
    if (!left || !total) return INVALID_VALUE;
    if (!is_open(current)) return INVALID_CONTEXT;
    *left = free_mib(current->ordinal) * (size_t)MIB;
    return total_memory(device_at(place_of(current->ordinal)), total);
}

static int release(address_t address) {
    struct allocation **it = find_allocation(address), *gone = *it;
    if (!gone) return INVALID_VALUE;
    *it = gone->next;
    free(gone);
    publish();
    return SUCCESS;
}

static int copy(void *to, const void *from, address_t device, size_t size) {
    if (!to || !from || !is_inside(device, size)) return INVALID_VALUE;
    memmove(to, from, size);
    return SUCCESS;
}

static int fill_bytes(address_t address, unsigned char value, size_t count) {
    if (!is_inside(address, count)) return INVALID_VALUE;
    memset((void *)address, value, count);
    return SUCCESS;
}

static int fill(address_t address, unsigned value, size_t count) {
    if (address % sizeof value || count > SIZE_MAX / sizeof value || !is_inside(address, count * sizeof value))
        return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = value;
    return SUCCESS;
}

CALL(cuMemAlloc_v2, (address_t *address, size_t size), allocate(address, size, false))
CALL(cuMemAllocManaged, (address_t *address, size_t size, unsigned flags),
     flags ? allocate(address, size, true) : INVALID_VALUE)
CALL(cuMemGetInfo_v2, (size_t *left, size_t *total), memory_info(left, total))
CALL(cuMemFree_v2, (address_t address), release(address))
CALL(cuMemcpyHtoD_v2, (address_t to, const void *from, size_t size), copy((void *)to, from, to, size))
CALL(cuMemcpyDtoH_v2, (void *to, address_t from, size_t size), copy(to, (void *)from, from, size))
CALL(cuMemsetD8_v2, (address_t address, unsigned char value, size_t count), fill_bytes(address, value, count))
CALL(cuMemsetD32_v2, (address_t address, unsigned value, size_t count), fill(address, value, count))

/* Numba lists no device if this function is missing. */
CALL(cuIpcOpenMemHandle_v2, (address_t *address, const void *handle, unsigned flags),
     address && handle && !flags ? NOT_SUPPORTED : INVALID_VALUE)
