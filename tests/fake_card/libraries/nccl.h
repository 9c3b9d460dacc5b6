// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// NCCL between processes of one machine, by shared memory.
//
// Before a collective moves anything, its ranks compare what each has called: operation, elements, type, reduction and
// root. Ranks that differ all get an error that says what each called, and from which line. Ranks that wait for each
// other in vain get one that says where every rank is. The environment:
//   FAKE_CARD_FOLDER     where the files of a job lie, the same for its ranks; needed for two ranks and more
//   FAKE_CARD_STALL_S    seconds in which all ranks wait and nothing moves, until that is an error (10)
//   FAKE_CARD_TIMEOUT_S  seconds that one call may wait (120)
//   FAKE_CARD_ALONE      1: this process plays one rank of many, without the others. They give what it gives itself
//   RANK, WORLD_SIZE     as for torch.distributed
#pragma once
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace fake_nccl {

// ncclResult_t, ncclDataType_t and ncclRedOp_t, as far as they are used.
enum Result { OK = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6 };
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FP8_E4M3, FP8_E5M2, TYPES };
enum Reduction { SUM, PRODUCT, MAX, MIN, AVERAGE, SCALED_SUMS, NO_REDUCTION = -1 };

constexpr size_t CHUNK = 1 << 20;        // bytes that a rank shows the others at a time
constexpr size_t MAIL_BYTES = 1 << 18;   // of a message at a time
constexpr int MOST_RANKS = 64, MOST_PROCESSES = 256, TEXT = 400;

// What a rank has called last, for the others to compare.
struct Slot {
  std::atomic<int> rank;  // of the job
  pid_t process;
  uint64_t sign[6];
  char text[TEXT];
};

// A message on its way between two ranks, piece by piece.
struct Mail {
  std::atomic<uint32_t> full;
  size_t bytes, of_all;
  int type;
  char text[TEXT];
};

// The beginning of a communicator's shared memory. Behind it: mails of each pair, chunks of each rank, mail's bytes.
struct Header {
  std::atomic<uint32_t> arrived, generation, broken;
  char why[8192];
  Slot slots[MOST_RANKS];
};

struct Comm {
  int size, rank;
  std::string id, name;  // the name is what torch calls the group
  Header *header;
  char *behind;
  size_t bytes;
  long calls, splits;
  int error;
  std::string ranks() const;
  std::string title() const;
  Mail &mail(int from, int to) const;
  char *chunk(int of_rank) const;
  char *mail_bytes(int from, int to) const;
};

struct Call {
  enum Kind { COLLECTIVE, SEND, RECEIVE } kind;
  Comm *comm;
  const char *name;
  const void *from;
  void *to;
  size_t count;
  int type, reduction, peer;  // peer: the root, or the other end of a message; -1: none
  std::string site;           // line of Python
  size_t done = 0;            // bytes of a message
  bool over = false;
  std::string text() const;
};

int number(const char *variable, int otherwise);
bool is_alone();
double seconds(const char *variable, double otherwise);
size_t size_of(int type);
const char *type_name(int type);
const char *reduction_name(int reduction);

// Sums and the like over what each rank gives.
void reduce(void *to, const std::vector<const char *> &inputs, size_t count, int type, int reduction);
std::vector<char> scaled(const void *from, size_t count, int type, double factor);
double first_value(const void *from, int type);

// Notes where this process is, for others that wait for it.
void note(const Comm *comm, const std::string &what);
void note_waiting(bool waits);
void note_progress();

// The reason goes to all ranks of the communicator, and to ncclGetLastError.
int fail(Comm *comm, int code, const std::string &why);
// What another rank has published.
int broken(Comm *comm);
const std::string &last_error();
void set_last_error(const std::string &why);

// Whether waiting still makes sense: an error if a rank that is needed has ended, or if all wait.
class Patience {
 public:
  explicit Patience(Comm *comm);
  int check();

 private:
  Comm *comm_;
  double began_, still_since_, next_;
  long seen_;
};

int barrier(Comm *comm);
int make(Comm **made, int size, const std::string &id, int rank, const char *name);
void forget(Comm *comm);
int collective(Call &call);
int messages(std::vector<Call> &calls);
extern std::atomic<long> num_calls, num_bytes;

}  // namespace fake_nccl
