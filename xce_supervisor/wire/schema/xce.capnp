# The messages of XCE as this project writes them. docs/protocol.md explains each field; wire/words.py holds their Python values.
#
# Rules for changes: never change or reuse a field number, never change a type; add fields at the end, and let 0, "", false
# and null mean "not given", so that an older peer, which does not send them, is read rightly. An age or a number that may be
# missing has a flag beside it (hasX), because 0 is a possible value. Times are milliseconds; ages are measured by the process
# that sends them on its own steady clock.

@0xc8a1f0d37b5e9246;

# ------------------------------------------------------------------ the envelope

struct Request {
  # The root of every frame. Its body is the struct that `opcode` (or, in a reply, `answer`) names.

  opcode @0 :UInt16;
  # What this is: 1 for a reply, else a number of the table in docs/protocol.md. A plain number, so that an unknown one can be
  # refused by id.

  answer @1 :UInt16;
  # In a reply, which struct the body is: 1 Done, 2 Refusal, 3 Redirect, else the opcode whose own reply struct it is.

  id @2 :UInt64;
  # A request: its number, above 0, counted by the sender for each connection. A push: 0. A reply: the number of the request.

  body @3 :AnyPointer;
}

# ------------------------------------------------------------------ replies without an opcode of their own

struct Done {
  index @0 :UInt64;
}

struct Refusal {
  code @0 :UInt16;
  text @1 :Text;
}

struct Redirect {
  address @0 :Text;
  controllerId @1 :Text;
  term @2 :UInt64;
}

# ------------------------------------------------------------------ sessions

struct Ping {
}

struct Join {
  hostRole @0 :UInt16;
  name @1 :Text;
  controllerId @2 :Text;
  term @3 :UInt64;
  spawnToken @4 :Text;
  slots @5 :UInt32;
  resume @6 :Text;
}

struct Joined {
  sessionId @0 :Text;
  controllerId @1 :Text;
  instanceId @2 :Text;
  term @3 :UInt64;
  heartbeatMs @4 :UInt32;
  sessionTimeoutMs @5 :UInt32;
}

struct Heartbeat {
  sessionId @0 :Text;
}

struct HeartbeatReply {
  role @0 :Text;
  term @1 :UInt64;
}

# ------------------------------------------------------------------ status

struct CtrlStatus {
  knownVersion @0 :UInt64;
  waitMs @1 :UInt32;
}

struct SchedulerSession {
  joined @0 :Bool;
  name @1 :Text;
  sinceMs @2 :UInt64;
  spawnToken @3 :Text;
  lastPushSeq @4 :UInt64;
  lastActedSeq @5 :UInt64;
  hasOldestUnackedMs @6 :Bool;
  oldestUnackedMs @7 :UInt64;
}

struct LeaseHeld {
  provider @0 :Text;
  holder @1 :Text;
  epochTerm @2 :UInt64;
  epochSeq @3 :UInt64;
  remainingMs @4 :UInt64;
}

struct CtrlStatusReply {
  controllerId @0 :Text;
  instanceId @1 :Text;
  role @2 :Text;
  term @3 :UInt64;
  primaryAddress @4 :Text;
  primaryId @5 :Text;
  gate @6 :Text;
  gateDetail @7 :Text;
  hasQuorumAgeMs @8 :Bool;
  quorumAgeMs @9 :UInt64;
  commitIndex @10 :UInt64;
  scheduler @11 :SchedulerSession;
  leases @12 :List(LeaseHeld);
  jobsPending @13 :UInt32;
  jobsRunning @14 :UInt32;
  jobsFinished @15 :UInt32;
  workers @16 :UInt32;
  version @17 :UInt64;
  longPoll @18 :Bool;
  uptimeMs @19 :UInt64;
  loopGapMs @20 :UInt64;
  engine @21 :Text;
}

# ------------------------------------------------------------------ pushes to a scheduler

struct JobView {
  jobId @0 :Text;
  command @1 :List(Text);
  slots @2 :UInt32;
  rerunnable @3 :Bool;
  constraint @4 :Text;
  state @5 :Text;
  attempt @6 :UInt32;
  worker @7 :Text;
  hasExitCode @8 :Bool;
  exitCode @9 :Int32;
  reason @10 :Text;
}

struct WorkerView {
  name @0 :Text;
  slots @1 :UInt32;
  alive @2 :Bool;
}

struct JobPush {
  seq @0 :UInt64;
  term @1 :UInt64;
  jobs @2 :List(JobView);
  full @3 :Bool;
}

struct QueuePush {
  seq @0 :UInt64;
  term @1 :UInt64;
  workers @2 :List(WorkerView);
}

struct ConfigPush {
  seq @0 :UInt64;
  term @1 :UInt64;
  maxDispatchPerCycle @2 :UInt32;
}

struct PushAck {
  sessionId @0 :Text;
  seq @1 :UInt64;
}

struct Resync {
  sessionId @0 :Text;
}

struct SchedulerExit {
  reason @0 :Text;
}

# ------------------------------------------------------------------ jobs

struct JobDispatch {
  sessionId @0 :Text;
  jobId @1 :Text;
  worker @2 :Text;
  attempt @3 :UInt32;
}

struct JobStart {
  jobId @0 :Text;
  attempt @1 :UInt32;
  command @2 :List(Text);
  term @3 :UInt64;
}

struct JobStateQuery {
  term @0 :UInt64;
}

struct JobAttempt {
  jobId @0 :Text;
  attempt @1 :UInt32;
  state @2 :Text;
  hasExitCode @3 :Bool;
  exitCode @4 :Int32;
  reason @5 :Text;
}

struct JobStateReport {
  sessionId @0 :Text;
  worker @1 :Text;
  attempts @2 :List(JobAttempt);
  full @3 :Bool;
}

struct JobSubmit {
  jobId @0 :Text;
  command @1 :List(Text);
  slots @2 :UInt32;
  rerunnable @3 :Bool;
  constraint @4 :Text;
}

struct JobQuery {
  jobIds @0 :List(Text);
  offset @1 :UInt64;
  limit @2 :UInt32;
}

struct JobList {
  jobs @0 :List(JobView);
  total @1 :UInt64;
}

# ------------------------------------------------------------------ operators of the reference cluster

struct StepDown {
  holdMs @0 :UInt32;
}

struct GateSet {
  gate @0 :Text;
  closed @1 :Bool;
  detail @2 :Text;
}

struct PushPlug {
  name @0 :Text;
  closed @1 :Bool;
}
