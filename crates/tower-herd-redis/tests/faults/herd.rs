//! What each test has: a server, a provider, and the processes between them.

use crate::{
    judge::{Call, Judge},
    support::Redis,
    worker::{Command, Load, MARK, PLAN, Plan, Policy, Status},
};
use rustix::process::{Pid, Signal, kill_process};
use std::{process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    time::{Instant, sleep, timeout},
};

/// How long anything may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !so().await {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        sleep(MS(20)).await;
    }
}

pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;

/// The times of a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) ttl: Duration,
    pub(crate) renew: Duration,
    pub(crate) gap: Duration,
    pub(crate) answer_within: Duration,
}

pub(crate) fn is_long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some()
}

impl Times {
    pub(crate) fn get() -> Self {
        if is_long() {
            Times { ttl: MS(10_000), renew: MS(1000), gap: MS(3000), answer_within: MS(500) }
        } else {
            Times { ttl: MS(2500), renew: MS(200), gap: MS(600), answer_within: MS(200) }
        }
    }

    /// The longest that a lease is used after a report was sent.
    pub(crate) fn used(&self) -> Duration {
        self.ttl.saturating_sub(self.gap + MS(50))
    }

    /// A renewal comes within this.
    pub(crate) fn renewal(&self) -> Duration {
        self.renew * 11 / 10
    }

    /// Longer than a lease by half of that.
    pub(crate) fn beyond(&self) -> Duration {
        self.ttl * 3 / 2
    }
}

/// How much later than the figure something may be that has a figure: machines that run tests are busy with others.
/// In the long mode it is the figure that counts.
pub(crate) fn slack() -> Duration {
    if is_long() { MS(1000) } else { MS(4000) }
}

#[derive(Debug)]
pub(crate) struct Herd {
    pub(crate) redis: Redis,
    pub(crate) judge: Judge,
    pub(crate) times: Times,
    pub(crate) plan: Plan,
    pub(crate) began: Instant,
}

/// All calls.
pub(crate) fn all(_: &Call) -> bool {
    true
}

impl Herd {
    pub(crate) async fn new(ceiling: u32) -> Self {
        Self::on(Redis::start().await, ceiling)
    }

    pub(crate) fn on(redis: Redis, ceiling: u32) -> Self {
        let judge = Judge::start();
        let times = Times::get();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap();
        let plan = Plan {
            name: String::new(),
            store: redis.url(),
            port: judge.port(),
            provider: "llm".to_owned(),
            ceiling,
            generation: 0,
            weight: 1,
            load: Load { callers: ceiling, hold: 300 },
            outage: Policy::Stop,
            strict: None,
            ttl: millis(times.ttl),
            renew: millis(times.renew),
            gap: millis(times.gap),
            grace: 600_000,
            answer_within: millis(times.answer_within),
            patience: 600_000,
            seed: None,
        };
        Herd { redis, judge, times, plan, began: Instant::now() }
    }

    pub(crate) fn start(&self, name: &str, change: impl FnOnce(&mut Plan)) -> Worker {
        let mut plan = self.plan.clone();
        name.clone_into(&mut plan.name);
        change(&mut plan);
        Worker::start(&plan)
    }

    /// Workers as they are by default: each of them alone could fill the ceiling.
    pub(crate) fn start_all(&self, names: &[&str]) -> Vec<Worker> {
        names.iter().map(|name| self.start(name, |_| {})).collect()
    }

    /// Waits until so many of these are in flight, from an instant on; since when they are.
    pub(crate) async fn filled(&self, from: Instant, many: usize, of: impl Fn(&Call) -> bool) -> Instant {
        let mut first = None;
        until(&format!("{many} in flight"), async || {
            first = self.judge.first(from, many, &of);
            first.is_some()
        })
        .await;
        first.unwrap()
    }

    /// Waits until the ceiling is full.
    pub(crate) async fn full(&self) -> Instant {
        self.filled(Instant::now(), self.plan.ceiling as usize, all).await
    }

    /// Never, since all began, were there more of these in flight than this.
    #[track_caller]
    pub(crate) fn holds(&self, ceiling: usize, of: impl Fn(&Call) -> bool) {
        let most = self.judge.most(self.began, of);
        assert!(most <= ceiling, "{most} in flight at the provider, of {ceiling}");
    }

    /// From then on the ceiling was in full use again within this time, and the measured one.
    pub(crate) async fn full_within(&self, from: Instant, within: Duration, what: &str) {
        let many = self.plan.ceiling as usize;
        let full = self.filled(from, many, all).await;
        report(what, full - from, within);
    }
}

/// Prints a figure, and asserts it.
#[track_caller]
pub(crate) fn report(what: &str, took: Duration, within: Duration) {
    eprintln!("{what}: {took:?} (bar {within:?})");
    assert!(took <= within + slack(), "{what}: {took:?}, and the bar is {within:?}");
}

/// A process of the fleet. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) name: String,
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    pub(crate) fn start(plan: &Plan) -> Self {
        let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "worker::worker", "--ignored", "--nocapture", "--test-threads", "1"]);
        command.env(PLAN, serde_json::to_string(plan).unwrap()).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        Worker { name: plan.name.clone(), child, stdin, stdout }
    }

    pub(crate) async fn tell(&mut self, command: Command) {
        let line = format!("{}\n", serde_json::to_string(&command).unwrap());
        self.stdin.write_all(line.as_bytes()).await.unwrap();
    }

    pub(crate) async fn hear(&mut self) -> Status {
        let answer = async {
            loop {
                let line = self.stdout.next_line().await.unwrap();
                let line = line.unwrap_or_else(|| panic!("worker {} is gone", self.name));
                if let Some((_, answer)) = line.split_once(MARK) {
                    return serde_json::from_str(answer).unwrap();
                }
            }
        };
        timeout(PATIENCE, answer).await.unwrap_or_else(|_| panic!("no answer of a worker"))
    }

    pub(crate) async fn ask(&mut self, command: Command) -> Status {
        self.tell(command).await;
        self.hear().await
    }

    pub(crate) async fn status(&mut self) -> Status {
        self.ask(Command::Status).await
    }

    pub(crate) async fn load(&mut self, callers: u32, hold: u64) {
        self.ask(Command::Load(Load { callers, hold })).await;
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.try_into().unwrap()));
        kill_process(pid.expect("it lives"), signal).unwrap();
    }

    /// SIGSTOP.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) fn owns(&self, call: &Call) -> bool {
        *call.worker == *self.name
    }
}
