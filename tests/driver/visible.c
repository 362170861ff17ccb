/* Which devices CUDA enumerates, read from CUDA's documentation of its environment variables:
 * https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars and, for instances,
 * https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA Device Enumeration").
 *
 * Decided here, where the documentation is silent:
 * - An integer counts every GPU in the order asked for, also one that CUDA then leaves out: a GPU in prohibited mode,
 *   or one with MIG on and no instance. Naming such a one adds nothing and does not end the list.
 * - The integer, or GPU- UUID, of a GPU with MIG on means its first instance.
 * - Blanks before a UUID are skipped, blanks after it make it invalid.
 * - Where an instance is visible, whole GPUs are dropped from the list, whoever named them; then drivers before 570
 *   keep the first instance only. An unset variable names all GPUs, from driver 570 on all their instances.
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

/* Anything but PCI_BUS_ID is the default, FASTEST_FIRST. */
static void fill_order(const char *order, int *gpus) {
    for (int i = 0; i < machine->gpus_count; i++) gpus[i] = i;
    if (!order || strcmp(order, "PCI_BUS_ID")) qsort(gpus, machine->gpus_count, sizeof *gpus, compare_speed);
}

static int first_slot(int gpu) {
    for (int slot = 0; slot < SLOTS; slot++)
        if (device_at((struct place){gpu, slot})) return slot;
    return NONE;
}

/* The device that stands for a GPU: itself, its first instance, or none (gpu NONE). */
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

/* Before driver 470 instances had no UUID of their own but this. */
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

/* The one device whose UUID begins so, false if there is none or more than one. */
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

/* The places named before the first invalid entry; the same one twice makes the list empty. */
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

/* See the top. */
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
