/* The devices that CUDA enumerates, according to its documentation of environment variables:
 * https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars and, for instances,
 * https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA Device Enumeration").
 *
 * The documentation leaves these cases open:
 * - An integer counts every GPU in the selected order, even one that CUDA skips: a GPU in prohibited mode, or a GPU
 *   with MIG enabled but no instance. Such an entry adds no device and does not end the list.
 * - The integer or GPU- UUID of a GPU with MIG enabled means its first instance.
 * - Spaces before a UUID are skipped; spaces after it make it invalid.
 * - If an instance is visible, all whole GPUs are removed from the list, and drivers before 570 keep only the first
 *   instance. An unset variable means all GPUs; from driver 570, it includes all instances.
 */
#define _GNU_SOURCE
#include "visible.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct list {
    struct place *places;
    int count;
};

static bool is_same(struct place a, struct place b) { return a.gpu == b.gpu && a.slot == b.slot; }

static void append(struct list *list, struct place place) { list->places[list->count++] = place; }

static bool has_duplicates(const struct list *list) {
    for (int i = 0; i < list->count; i++)
        for (int j = 0; j < i; j++)
            if (is_same(list->places[i], list->places[j])) return true;
    return false;
}

/* ---- the machine in CUDA's order --------------------------------------------------------- */

static int compare_speed(const void *one, const void *other) {
    int a = *(const int *)one, b = *(const int *)other;
    int faster = machine->gpus[b].speed - machine->gpus[a].speed;
    return faster ? faster : a - b;
}

/* Any value other than PCI_BUS_ID means the default, FASTEST_FIRST. */
static void fill_order(const char *order, int *gpus) {
    for (int i = 0; i < machine->gpus_count; i++) gpus[i] = i;
    if (!order || strcmp(order, "PCI_BUS_ID")) qsort(gpus, machine->gpus_count, sizeof *gpus, compare_speed);
}

static int first_slot(int gpu) {
    for (int slot = 0; slot < SLOTS; slot++)
        if (device_at((struct place){gpu, slot})) return slot;
    return NONE;
}

/* Return the device that a GPU's number selects: the GPU, its first instance, or none (gpu NONE). */
static struct place device_of(int gpu) {
    bool is_split = machine->gpus[gpu].mig == MIG_ON;
    struct place place = {gpu, is_split ? first_slot(gpu) : NONE};
    if (machine->gpus[gpu].mode == PROHIBITED || (is_split && place.slot == NONE)) place.gpu = NONE;
    return place;
}

static bool has_many_instances(void) { return atoi(machine->driver) >= 570; }

static void append_gpu(struct list *list, int gpu) {
    struct place first = device_of(gpu);
    if (first.gpu == NONE) return;
    append(list, first);
    for (int slot = first.slot + 1; first.slot != NONE && has_many_instances() && slot < SLOTS; slot++)
        if (device_at((struct place){gpu, slot})) append(list, (struct place){gpu, slot});
}

/* ---- one entry of the list --------------------------------------------------------------- */

static bool starts_with(const char *text, const char *prefix) { return !strncmp(text, prefix, strlen(prefix)); }

/* Before driver 470, MIG instances had UUIDs of this form. */
static void old_name(char *name, size_t size, int gpu, const struct device *instance) {
    snprintf(name, size, "MIG-%s/%d/%d", machine->gpus[gpu].whole.uuid, instance->gpu_instance,
             instance->compute_instance);
}

static bool is_called(struct place place, const char *entry) {
    const struct device *device = device_at(place);
    char old[2 * TEXT];
    if (!device) return false;
    if (starts_with(device->uuid, entry)) return true;
    if (place.slot == NONE) return false;
    old_name(old, sizeof old, place.gpu, device);
    return !strcmp(old, entry);
}

/* Find the only device whose UUID has this prefix. Return false if none or several match. */
static bool find_by_uuid(const char *entry, struct place *found) {
    int matches = 0;
    for (int gpu = 0; gpu < machine->gpus_count; gpu++)
        for (int slot = NONE; slot < SLOTS; slot++)
            if (is_called((struct place){gpu, slot}, entry)) {
                *found = (struct place){gpu, slot};
                matches++;
            }
    return matches == 1;
}

static bool find_by_integer(const char *entry, const int *order, struct place *found) {
    char *end;
    errno = 0;
    unsigned long index = strtoul(entry, &end, 10);
    if (end == entry || errno || index >= (unsigned long)machine->gpus_count) return false;
    *found = (struct place){order[index], NONE};
    return true;
}

static bool find_entry(const char *entry, const int *order, struct place *found) {
    while (isspace((unsigned char)*entry)) entry++;
    bool is_uuid = starts_with(entry, "GPU-") || starts_with(entry, "MIG-");
    return is_uuid ? find_by_uuid(entry, found) : find_by_integer(entry, order, found);
}

/* ---- the list ---------------------------------------------------------------------------- */

/* Return the places before the first invalid entry. A repeated place makes the list empty. */
static void read_list(const char *visible, const int *order, struct list *list) {
    char entry[2 * TEXT];
    for (struct place found = {NONE, NONE}; list->count < ORDINALS; visible++) {
        size_t length = strcspn(visible, ",");
        if (length >= sizeof entry) return;
        snprintf(entry, sizeof entry, "%.*s", (int)length, visible);
        if (!find_entry(entry, order, &found)) return;
        struct place device = found.slot == NONE ? device_of(found.gpu) : found;
        if (device.gpu != NONE) append(list, device);
        if (has_duplicates(list)) list->count = 0;
        visible += length;
        if (!*visible || !list->count) return;
    }
}

/* Apply the rules for MIG instances from the top of this file. */
static void apply_instance_rules(struct list *list) {
    struct list instances = {list->places, 0};
    for (int i = 0; i < list->count; i++)
        if (list->places[i].slot != NONE) append(&instances, list->places[i]);
    if (instances.count) list->count = has_many_instances() ? instances.count : 1;
}

int visible_devices(const char *visible, const char *order, struct place *into) {
    int gpus[GPUS];
    struct list list = {into, 0};
    fill_order(order, gpus);
    if (visible) read_list(visible, gpus, &list);
    else
        for (int i = 0; i < machine->gpus_count; i++) append_gpu(&list, gpus[i]);
    apply_instance_rules(&list);
    return list.count;
}
