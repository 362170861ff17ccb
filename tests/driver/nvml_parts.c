/* libnvidia-ml.so.1: MIG instances, and the topology of GPUs. */
#define _GNU_SOURCE
#include "nvml.h"

/* ---- MIG --------------------------------------------------------------------------------- */

static int mig_mode(const struct subject *it, unsigned *current, unsigned *pending) {
    if (!current || !pending) return INVALID_ARGUMENT;
    if (it->is_instance || it->gpu->mig == MIG_UNKNOWN) return NOT_SUPPORTED;
    *current = *pending = it->gpu->mig == MIG_ON;
    return SUCCESS;
}

static int mig_handle(const struct subject *it, unsigned slot, handle_t *instance) {
    if (!instance) return INVALID_ARGUMENT;
    if (!is_split(it)) return NOT_FOUND;
    if (slot >= (unsigned)it->gpu->slots || slot >= SLOTS) return INVALID_ARGUMENT;
    struct place place = {it->place.gpu, slot};
    return device_at(place) ? give_handle(place, instance) : NOT_FOUND;
}

/* This is not a DEVICE_CALL, because its rules and log name the instance, but its handle is the GPU's. */
EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(handle_t device, unsigned slot, handle_t *instance) {
    struct subject it;
    struct place place = place_of(device);
    if (place.gpu >= 0 && slot < SLOTS) place.slot = slot;
    enter_call();
    int code = obstacle(__func__, place);
    if (!code) code = find_subject(device, &it);
    return leave(code ? code : mig_handle(&it, slot, instance));
}

DEVICE_CALL(nvmlDeviceGetMigMode, (handle_t device, unsigned *current, unsigned *pending),
            mig_mode(&it, current, pending))
DEVICE_CALL(nvmlDeviceGetMaxMigDeviceCount, (handle_t device, unsigned *count), number(it.gpu->slots, count))
DEVICE_CALL(nvmlDeviceIsMigDeviceHandle, (handle_t device, unsigned *is_mig), number(it.is_instance, is_mig))
DEVICE_CALL(nvmlDeviceGetGpuInstanceId, (handle_t device, unsigned *id),
            it.is_instance ? number(it.device->gpu_instance, id) : INVALID_ARGUMENT)
DEVICE_CALL(nvmlDeviceGetComputeInstanceId, (handle_t device, unsigned *id),
            it.is_instance ? number(it.device->compute_instance, id) : INVALID_ARGUMENT)
DEVICE_CALL(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (handle_t device, handle_t *parent),
            it.is_instance ? give_handle((struct place){it.place.gpu, NONE}, parent) : INVALID_ARGUMENT)

/* ---- topology ---------------------------------------------------------------------------- */

/* Use the scenario's link. Without one, compare the sockets if both GPUs name one. */
static enum link ancestor(const struct subject *one, const struct subject *other) {
    if (one->place.gpu == other->place.gpu) return 0;  /* on the same board */
    if (one->gpu->links[other->place.gpu]) return one->gpu->links[other->place.gpu];
    return one->gpu->numa != NONE && one->gpu->numa == other->gpu->numa ? NODE : SYSTEM;
}

static bool are_nvlinked(const struct subject *one, const struct subject *other) {
    return one->gpu->nvlink[other->place.gpu];
}

/* Peers are connected by NVLink, or by PCIe below one host bridge. */
static int p2p(const struct subject *one, const struct subject *other, unsigned kind, unsigned *status) {
    enum { OK = 0, UNSUPPORTED = 5 };
    enum { READ = 0, WRITE = 1, NVLINK = 2, KINDS_OF_P2P = 5 };
    if (!status || kind >= KINDS_OF_P2P) return INVALID_ARGUMENT;
    bool can = are_nvlinked(one, other) || (kind <= WRITE && ancestor(one, other) <= HOST);
    *status = can ? OK : UNSUPPORTED;
    return SUCCESS;
}

/* A call about two devices. Rules and log use the first. */
#define PAIR_CALL(function, parameters, answer)                       \
    EXPORT int function parameters {                                  \
        struct subject it, other;                                     \
        int code = enter(__func__, device, &it);                      \
        if (code) return code;                                        \
        code = find_subject(second, &other);                          \
        return leave(code ? code : (answer));                         \
    }

PAIR_CALL(nvmlDeviceGetTopologyCommonAncestor, (handle_t device, handle_t second, unsigned *level),
          number(ancestor(&it, &other), level))
PAIR_CALL(nvmlDeviceGetP2PStatus, (handle_t device, handle_t second, unsigned kind, unsigned *status),
          p2p(&it, &other, kind, status))

/* The GPU at the other end of NVLink number `link`, or -1. */
static int nvlink_peer(const struct gpu *gpu, unsigned link) {
    for (int other = 0; other < machine->gpus_count; other++)
        if (gpu->nvlink[other] && link-- == 0) return other;
    return NONE;
}

static int nvlink_state(const struct gpu *gpu, unsigned link, unsigned *active) {
    enum { MOST_LINKS = 18 };
    if (!active || link >= MOST_LINKS) return INVALID_ARGUMENT;
    if (nvlink_peer(gpu, 0) == NONE) return NOT_SUPPORTED;
    *active = nvlink_peer(gpu, link) != NONE;
    return SUCCESS;
}

static int nvlink_pci(const struct gpu *gpu, unsigned link, struct pci_v3 *info) {
    int peer = nvlink_peer(gpu, link);
    return peer == NONE ? NOT_SUPPORTED : fill_pci_v3(&machine->gpus[peer], info);
}

DEVICE_CALL(nvmlDeviceGetNvLinkState, (handle_t device, unsigned link, unsigned *active),
            nvlink_state(it.gpu, link, active))
DEVICE_CALL(nvmlDeviceGetNvLinkRemotePciInfo_v2, (handle_t device, unsigned link, struct pci_v3 *info),
            nvlink_pci(it.gpu, link, info))
