/* libnvidia-ml.so.1: properties of a device, and sensors. */
#define _GNU_SOURCE
#include "nvml.h"

#include <stdio.h>
#include <string.h>

/* ---- properties -------------------------------------------------------------------------- */

/* The NVML 1 version writes only as much as callers of that version allocate. */
struct pci_v1 {
    char bus_id[16];
    unsigned domain, bus, device, pci_device_id;
};

struct pci_v2 {
    char bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id, reserved[4];
};

enum { PCI_DEVICE_ID = 0x1c8210de, PCI_SUBSYSTEM_ID = 0x11bf10de };

int fill_pci_v3(const struct gpu *gpu, struct pci_v3 *info) {
    if (!info) return INVALID_ARGUMENT;
    *info = (struct pci_v3){"", gpu->domain, gpu->bus, gpu->slot, PCI_DEVICE_ID, PCI_SUBSYSTEM_ID, ""};
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.%X", gpu->domain & 0xffff,
             gpu->bus & 0xff, gpu->slot & 0xff, gpu->function & 7);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.%X", gpu->domain, gpu->bus, gpu->slot, gpu->function);
    return SUCCESS;
}

static int fill_pci_v2(const struct gpu *gpu, struct pci_v2 *info) {
    struct pci_v3 whole;
    if (!info) return INVALID_ARGUMENT;
    fill_pci_v3(gpu, &whole);
    *info = (struct pci_v2){"", gpu->domain, gpu->bus, gpu->slot, PCI_DEVICE_ID, PCI_SUBSYSTEM_ID, {0}};
    memcpy(info->bus_id, whole.bus_id_legacy, sizeof info->bus_id);
    return SUCCESS;
}

static int fill_pci_v1(const struct gpu *gpu, struct pci_v1 *info) {
    struct pci_v2 whole;
    if (!info) return INVALID_ARGUMENT;
    fill_pci_v2(gpu, &whole);
    memcpy(info, &whole, sizeof *info);
    return SUCCESS;
}

/* Derive the architecture from the device's name. */
static int brand(const struct subject *it, unsigned *brand) {
    enum { BRAND_GEFORCE = 5, BRAND_TITAN = 6, BRAND_NVIDIA = 14 };
    const char *name = it->gpu->whole.name;
    return number(strstr(name, "GeForce") ? BRAND_GEFORCE : strstr(name, "TITAN") ? BRAND_TITAN : BRAND_NVIDIA, brand);
}

static int capability(const struct gpu *gpu, int *major, int *minor) {
    if (!major || !minor) return INVALID_ARGUMENT;
    *major = gpu->major_capability;
    *minor = gpu->minor_capability;
    return SUCCESS;
}

struct addressing {
    unsigned version, mode;
};

static int addressing(const struct gpu *gpu, struct addressing *to) {
    enum { VERSION = sizeof *to | 1 << 24 };
    if (!to) return INVALID_ARGUMENT;
    if (to->version != VERSION) return ARGUMENT_VERSION_MISMATCH;
    return number(gpu->addressing, &to->mode);
}

/* A MIG instance has its own name, UUID and memory; other properties belong to its GPU. */
DEVICE_CALL(nvmlDeviceGetName, (handle_t device, char *name, unsigned length), text(it.device->name, name, length))
DEVICE_CALL(nvmlDeviceGetUUID, (handle_t device, char *uuid, unsigned length), text(it.device->uuid, uuid, length))
DEVICE_CALL(nvmlDeviceGetIndex, (handle_t device, unsigned *index), number(it.place.gpu, index))
DEVICE_CALL(nvmlDeviceGetVbiosVersion, (handle_t device, char *version, unsigned length),
            strcmp(it.gpu->vbios, "none") ? text(it.gpu->vbios, version, length) : NOT_SUPPORTED)
DEVICE_CALL(nvmlDeviceGetMinorNumber, (handle_t device, unsigned *minor), number(it.gpu->minor, minor))
DEVICE_CALL(nvmlDeviceGetNumaNodeId, (handle_t device, unsigned *node), number(it.gpu->numa, node))
DEVICE_CALL(nvmlDeviceGetAddressingMode, (handle_t device, struct addressing *mode), addressing(it.gpu, mode))
DEVICE_CALL(nvmlDeviceGetBrand, (handle_t device, unsigned *type), brand(&it, type))
DEVICE_CALL(nvmlDeviceGetCudaComputeCapability, (handle_t device, int *major, int *minor),
            capability(it.gpu, major, minor))
DEVICE_CALL(nvmlDeviceGetPciInfo, (handle_t device, struct pci_v1 *info), fill_pci_v1(it.gpu, info))
DEVICE_CALL(nvmlDeviceGetPciInfo_v2, (handle_t device, struct pci_v2 *info), fill_pci_v2(it.gpu, info))
DEVICE_CALL(nvmlDeviceGetPciInfo_v3, (handle_t device, struct pci_v3 *info), fill_pci_v3(it.gpu, info))
DEVICE_CALL(nvmlDeviceGetComputeMode, (handle_t device, unsigned *mode), number(it.gpu->mode, mode))
DEVICE_CALL(nvmlDeviceGetCurrPcieLinkWidth, (handle_t device, unsigned *width), number(it.gpu->width, width))
DEVICE_CALL(nvmlDeviceGetMaxPcieLinkWidth, (handle_t device, unsigned *width), number(it.gpu->width, width))
DEVICE_CALL(nvmlDeviceGetCurrPcieLinkGeneration, (handle_t device, unsigned *generation),
            number(it.gpu->generation, generation))
DEVICE_CALL(nvmlDeviceGetMaxPcieLinkGeneration, (handle_t device, unsigned *generation),
            number(it.gpu->generation, generation))

static int fill_rows(const struct gpu *gpu, unsigned *corrected, unsigned *uncorrectable, unsigned *pending,
                     unsigned *failed) {
    if (gpu->remap_pending == NONE || gpu->remap_failed == NONE) return NOT_SUPPORTED;
    int code = number(0, corrected);
    if (!code) code = number(0, uncorrectable);
    if (!code) code = number(gpu->remap_pending, pending);
    return code ? code : number(gpu->remap_failed, failed);
}

DEVICE_CALL(nvmlDeviceGetRemappedRows,
            (handle_t device, unsigned *corrected, unsigned *uncorrectable, unsigned *pending, unsigned *failed),
            fill_rows(it.gpu, corrected, uncorrectable, pending, failed))

/* Fields are requested by number; this driver supports one. */
struct field {
    unsigned field, scope;
    long long time, latency;
    int type, code;
    unsigned long long value;
};

static int fill_fields(const struct gpu *gpu, int count, struct field *fields) {
    enum { RECOVERY_ACTION = 230, UNSIGNED = 1 };
    if (!fields || count < 1) return INVALID_ARGUMENT;
    for (struct field *field = fields; field < fields + count; field++) {
        bool is_known = field->field == RECOVERY_ACTION && gpu->recovery != NONE;
        field->code = is_known ? SUCCESS : NOT_SUPPORTED;  /* the value of an unknown field means nothing */
        field->type = UNSIGNED;
        field->value = (unsigned)gpu->recovery;
    }
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetFieldValues, (handle_t device, int count, struct field *fields),
            fill_fields(it.gpu, count, fields))

/* ---- sensors ----------------------------------------------------------------------------- */

struct temperature_v1 {
    unsigned version, sensor;
    int degrees;
};

static int temperature_v1(const struct gpu *gpu, struct temperature_v1 *to) {
    enum { VERSION = sizeof *to | 1 << 24 };
    if (!to || to->sensor) return INVALID_ARGUMENT;
    if (to->version != VERSION) return ARGUMENT_VERSION_MISMATCH;
    if (gpu->temperature == NONE) return NOT_SUPPORTED;
    to->degrees = gpu->temperature;
    return SUCCESS;
}

static int milliwatts(int watts, unsigned *to) {
    return number(watts == NONE ? NONE : watts * 1000, to);
}

DEVICE_CALL(nvmlDeviceGetTemperature, (handle_t device, unsigned sensor, unsigned *degrees),
            sensor ? INVALID_ARGUMENT : number(it.gpu->temperature, degrees))
DEVICE_CALL(nvmlDeviceGetTemperatureV, (handle_t device, struct temperature_v1 *temperature),
            temperature_v1(it.gpu, temperature))
DEVICE_CALL(nvmlDeviceGetPowerUsage, (handle_t device, unsigned *power), milliwatts(it.gpu->power, power))
DEVICE_CALL(nvmlDeviceGetEnforcedPowerLimit, (handle_t device, unsigned *limit), milliwatts(it.gpu->power_limit, limit))

/* ---- sensors that no test reads: plausible constants ------------------------------------- */

static const unsigned long long mib = 1 << 20;

struct bar1 {
    unsigned long long total, free, used;
};

static int bar1(struct bar1 *memory) {
    if (!memory) return INVALID_ARGUMENT;
    *memory = (struct bar1){256 * mib, 251 * mib, 5 * mib};
    return SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetPowerManagementLimit, (handle_t device, unsigned *milliwatts), number(250000, milliwatts))
DEVICE_CALL(nvmlDeviceGetFanSpeed, (handle_t device, unsigned *percent), number(30, percent))
DEVICE_CALL(nvmlDeviceGetClockInfo, (handle_t device, unsigned type, unsigned *mhz),
            ((void)type, number(1000, mhz)))
DEVICE_CALL(nvmlDeviceGetMaxClockInfo, (handle_t device, unsigned type, unsigned *mhz),
            ((void)type, number(1500, mhz)))
DEVICE_CALL(nvmlDeviceGetPersistenceMode, (handle_t device, unsigned *mode), number(0, mode))
DEVICE_CALL(nvmlDeviceGetPerformanceState, (handle_t device, unsigned *state), number(8, state))
DEVICE_CALL(nvmlDeviceGetDisplayActive, (handle_t device, unsigned *active), number(it.gpu->screen, active))
DEVICE_CALL(nvmlDeviceGetDisplayMode, (handle_t device, unsigned *mode), number(0, mode))
DEVICE_CALL(nvmlDeviceGetSerial, (handle_t device, char *serial, unsigned length),
            ((void)serial, (void)length, NOT_SUPPORTED))
DEVICE_CALL(nvmlDeviceGetPcieThroughput, (handle_t device, unsigned counter, unsigned *kib_per_s),
            ((void)counter, number(0, kib_per_s)))
DEVICE_CALL(nvmlDeviceGetTotalEccErrors,
            (handle_t device, unsigned type, unsigned counter, unsigned long long *count),
            ((void)type, (void)counter, (void)count, NOT_SUPPORTED))
DEVICE_CALL(nvmlDeviceGetEccMode, (handle_t device, unsigned *current, unsigned *pending),
            ((void)current, (void)pending, NOT_SUPPORTED))
DEVICE_CALL(nvmlDeviceGetDriverModel, (handle_t device, unsigned *current, unsigned *pending),
            ((void)current, (void)pending, NOT_SUPPORTED))
DEVICE_CALL(nvmlDeviceGetDriverModel_v2, (handle_t device, unsigned *current, unsigned *pending),
            ((void)current, (void)pending, NOT_SUPPORTED))
DEVICE_CALL(nvmlDeviceGetBAR1MemoryInfo, (handle_t device, struct bar1 *memory), bar1(memory))
DEVICE_CALL(nvmlDeviceGetSupportedEventTypes, (handle_t device, unsigned long long *types),
            types ? (*types = 0, SUCCESS) : INVALID_ARGUMENT)
