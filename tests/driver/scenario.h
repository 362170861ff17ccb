/* The machine that a scenario file describes, read again at every call; shared by both libraries. */
#ifndef STAND_IN_SCENARIO_H
#define STAND_IN_SCENARIO_H

#include <stdbool.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

/* Fixed sizes: nothing is allocated, so nothing can leak however often the file changes. PROCESSES: of all devices. */
enum { GPUS = 64, SLOTS = 8, PROCESSES = 2048, RULES = 64, TEXT = 96, NAME = 80, PATH = 4096 };

enum { NONE = -1 };                                /* "not reported" */
enum kind { COMPUTE, GRAPHICS, MPS, KINDS };
enum mode { DEFAULT, EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE_PROCESS };
enum mig { MIG_OFF, MIG_ON, MIG_UNKNOWN };
enum link { UNSAID, SWITCH = 10, SWITCHES = 20, HOST = 30, NODE = 40, SYSTEM = 50 };

struct process {
    enum kind kind;
    pid_t pid;
    int mib;                                       /* NONE: the driver does not say */
    bool until_dead;
};

/* What can be used: a whole GPU, or one MIG instance of it. */
struct device {
    bool there;
    char name[TEXT], uuid[TEXT];
    int memory_mib, reserved_mib, used_mib;        /* memory NONE: no memory readings */
    int limit_mib;                                 /* of the control group of who asks; 0: none */
    int gpu_instance, compute_instance;
    int first_process, processes_count;            /* of the scenario's */
};

struct gpu {
    struct device whole;
    unsigned domain, bus, slot, function;          /* the PCI address */
    char vbios[TEXT];
    int width, generation, mode, utilisation, temperature, power, power_limit, speed, minor, numa, addressing;
    int remap_pending, remap_failed, recovery, screen;
    int major_capability, minor_capability;
    int mig, slots;
    enum link links[GPUS];
    bool nvlink[GPUS];
    struct device instances[SLOTS];
};

/* Where a call goes: gpu < 0 is no device, slot < 0 the whole GPU. */
struct place {
    int gpu, slot;
};

struct rule {
    enum { FAIL, DELAY, DELAY_FIRST } what;
    char function[NAME];
    bool everywhere;
    struct place place;
    int code;
    double seconds;
};

struct scenario {
    char driver[TEXT], contexts[PATH];
    int cuda, count;                               /* count NONE: as many as described */
    int gpus_count, rules_count, processes_count;
    struct gpu gpus[GPUS];
    struct rule rules[RULES];
    struct process processes[PROCESSES];           /* each device's in a row */
};

/* The machine as it is now, NULL where none is described. Only between enter_call and leave_call. */
extern const struct scenario *machine;

/* Takes the lock and reads the machine. */
void enter_call(void);
/* Logs the call, waits without the lock as the rules say, reads again; answers a fail rule's code or 0. */
int obey_rules(const char *function, struct place place);
void leave_call(void);

const struct device *device_at(struct place place);
bool is_alive(pid_t pid);

/* Calls `each` for every CUDA context that a living process holds on the device with that UUID. */
void each_context(const char *uuid, void (*each)(void *to, struct process process), void *to);

/* What is in use there, a GPU's with that of its instances; without the contexts of the process `besides`, if any. */
long used_mib(struct place place, pid_t besides);

__attribute__((format(printf, 1, 2), noreturn)) void give_up(const char *format, ...);

#endif
