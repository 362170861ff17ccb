/* The machine described by a scenario file, which is read at every call. Both libraries use it. */
#ifndef STAND_IN_SCENARIO_H
#define STAND_IN_SCENARIO_H

#include <stdbool.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

/* Fixed sizes avoid allocations, so nothing leaks when the file changes. PROCESSES counts those of all devices. */
enum { GPUS = 64, SLOTS = 8, PROCESSES = 2048, RULES = 64, TEXT = 96, NAME = 80, PATH = 4096 };

enum { NONE = -1 };                                /* "not reported" */
enum kind { COMPUTE, GRAPHICS, MPS, MANAGED };        /* the driver never lists MANAGED */
enum mode { DEFAULT, EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE_PROCESS };
enum mig { MIG_OFF, MIG_ON, MIG_UNKNOWN };
enum conf_compute { CONF_NONE, CONF_OFF, CONF_ON, CONF_PROTECTED_PCIE };
enum samples { EPOCH, BOOT, MONOTONIC, OFFSET, STRANGE, RUBBISH, EMPTY };
enum link { UNSAID, SWITCH = 10, SWITCHES = 20, HOST = 30, NODE = 40, SYSTEM = 50 };

struct process {
    enum kind kind;
    pid_t pid;
    int mib;                                       /* NONE if the driver does not report it */
    bool until_dead;
    bool is_unlisted;                              /* it has ended, and only its memory is still in use */
};

/* A device: a whole GPU, or one of its MIG instances. */
struct device {
    bool there;
    char name[TEXT], uuid[TEXT];
    int memory_mib, reserved_mib, used_mib;        /* memory NONE means no memory readings */
    int limit_mib;                                 /* limit of the caller's control group, or 0 */
    int gpu_instance, compute_instance;
    int first_process, processes_count;            /* index and count in the scenario's processes */
};

struct gpu {
    struct device whole;
    unsigned domain, bus, slot, function;          /* PCI address */
    char vbios[TEXT];                              /* "none" if the driver does not report it */
    int width, generation, mode, utilisation, temperature, power, power_limit, speed, minor, numa, addressing;
    int remap_pending, remap_failed, recovery, screen;
    int major_capability, minor_capability;
    int mig, slots;
    int samples;                                   /* enum samples */
    int use_ended_s;                               /* seconds since the processes stopped computing, or NONE */
    enum link links[GPUS];
    bool nvlink[GPUS];
    struct device instances[SLOTS];
};

/* The device of a call. gpu < 0 means no device, slot < 0 the whole GPU. */
struct place {
    int gpu, slot;
};

struct rule {
    enum { FAIL, DELAY, DELAY_FIRST, STUCK } what;
    char function[NAME];
    bool everywhere;
    struct place place;
    int code;
    double seconds;
    char path[2 * TEXT];                           /* of STUCK */
};

/* How the memory of a process with a context is freed after its end. */
struct freeing {
    double seconds;
    bool is_gradual, is_listed;
};

struct scenario {
    char driver[TEXT], contexts[PATH];
    struct freeing freeing;
    int cuda, count;                               /* count NONE means the number of described GPUs */
    int context_mib;                               /* memory of a CUDA context */
    int conf_compute, conf_compute_ready;          /* conf_compute CONF_NONE means no GPU supports it */
    int gpus_count, rules_count, processes_count;
    struct gpu gpus[GPUS];
    struct rule rules[RULES];
    struct process processes[PROCESSES];           /* grouped by device */
};

/* The current machine, or NULL without a scenario. Valid between enter_call and leave_call. */
extern const struct scenario *machine;

/* Take the lock and read the machine. */
void enter_call(void);
/* Log the call, wait without the lock as the rules say, and read the machine again. Return a fail rule's code, or 0. */
int obey_rules(const char *function, struct place place);
void leave_call(void);

const struct device *device_at(struct place place);
bool is_alive(pid_t pid);

/* Call `each` for every CUDA context on the device with this UUID, including those whose memory is still being freed. */
void each_context(const char *uuid, void (*each)(void *to, struct process process), void *to);

/* Return the memory in use on a device, including its instances. Contexts of the process `except` are not counted. */
long used_mib(struct place place, pid_t except);

__attribute__((format(printf, 1, 2), noreturn)) void give_up(const char *format, ...);

#endif
