//! One process of the fleet: the shipped client, on a tokio runtime of its own.
//!
//! Each has its own paused clock, so that a process can be stopped as SIGSTOP does it (nothing of it runs, and then
//! its clock has jumped), suspended (its monotonic clock has not), killed (the runtime is dropped as it is), and can
//! have a clock that runs wrong.

use super::judge::{At, Judge, Life};
use fastrand::Rng;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Runtime,
    sync::{mpsc, oneshot},
    time::{Instant, advance, sleep, sleep_until, timeout},
};
use tower::{ServiceExt as _, layer::Layer as _, service_fn};
use tower_herd::{
    BoxError, Classify, Fleet, FleetLimitLayer, HasTask, Kind, Provider, ProviderSettings, Signal,
    store::{
        Exchange, FleetSettings, FleetStore, Grant, HolderId, Listen, Report, StoreError, StoreErrorKind,
        Wake,
    },
};

pub const PROVIDER: &str = "llm";

pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the agents of a process do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Calls a second, of one process that has work,
    pub rate: f64,
    /// and of one that has more than its slots all the time.
    pub steady: f64,
    /// The longest call.
    pub longest: Duration,
    /// The usual length of a call, at most.
    pub usual: Duration,
    /// Of a thousand calls, those that are given up.
    pub given_up: u32,
}

/// A report on its way.
pub struct Sent {
    pub life: Life,
    pub at: At,
    pub report: Report,
    pub reply: Reply,
}

pub type Reply = oneshot::Sender<Result<Grant, StoreError>>;

/// What the world and the inside of a process share.
struct Inside {
    life: Life,
    born: At,
    /// How wrong its clock runs, in millionths.
    drift: i64,
    /// Its own time that its monotonic clock has missed.
    slept: AtomicU64,
    origin: Instant,
    /// It was killed: what is dropped now is not given up by anybody.
    dead: AtomicBool,
    /// Its agents have no more work.
    idle: AtomicBool,
    /// They have work all the time.
    steady: AtomicBool,
    outbox: Arc<Mutex<Vec<Sent>>>,
    judge: Arc<Mutex<Judge>>,
}

impl Inside {
    /// The time since it was born by its own clock, suspended or not.
    fn own(&self, at: At) -> u64 {
        scale(at.saturating_sub(self.born), self.drift)
    }

    fn elapsed(&self) -> u64 {
        let ticked = Instant::now().saturating_duration_since(self.origin).as_nanos();
        u64::try_from(ticked).unwrap_or(u64::MAX).saturating_add(self.slept.load(Relaxed))
    }

    fn now(&self) -> At {
        self.born + scale_back(self.elapsed(), self.drift)
    }
}

fn scale(nanos: u64, drift: i64) -> u64 {
    let rate = u128::try_from(1_000_000 + i128::from(drift)).unwrap_or(1);
    u64::try_from(u128::from(nanos) * rate / 1_000_000).unwrap_or(u64::MAX)
}

fn scale_back(nanos: u64, drift: i64) -> u64 {
    let rate = u128::try_from(1_000_000 + i128::from(drift)).unwrap_or(1);
    u64::try_from((u128::from(nanos) * 1_000_000).div_ceil(rate)).unwrap_or(u64::MAX)
}

/// The network, as a process sees it.
struct Line {
    inside: Arc<Inside>,
    wakes: Mutex<Option<mpsc::UnboundedReceiver<Option<HolderId>>>>,
}

impl FleetStore for Line {
    fn exchange<'a>(&'a self, _: &'a str, report: &'a Report) -> Exchange<'a> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let Inside { life, outbox, .. } = &*self.inside;
            let at = self.inside.now();
            lock(outbox).push(Sent { life: *life, at, report: report.clone(), reply });
            match answer.await {
                Ok(answer) => answer,
                // Lost: nobody will ever say so.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn listen<'a>(&'a self, wakes: &'a (dyn Fn(Wake<'_>) + Send + Sync)) -> Listen<'a> {
        let receiver = lock(&self.wakes).take();
        Box::pin(async move {
            let mut receiver = receiver.expect("a fleet listens once");
            while let Some(holder) = receiver.recv().await {
                wakes(Wake { provider: PROVIDER, holder });
            }
        })
    }
}

/// A call of an agent: how long the provider works on it.
struct Call(Duration);

impl HasTask for Call {}

/// All replies are good.
#[derive(Clone)]
struct Good;

impl Classify<()> for Good {
    fn classify(&self, _: Result<&(), &(dyn std::error::Error + 'static)>) -> Signal {
        Signal::new(Kind::Success)
    }
}

/// A call at the provider. Dropped before its end, the provider sees that its caller hung up.
struct Flight {
    inside: Arc<Inside>,
    id: u64,
    over: bool,
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.over && !self.inside.dead.load(Relaxed) {
            let now = self.inside.now();
            lock(&self.inside.judge).end(self.id, now);
        }
    }
}

async fn work(inside: Arc<Inside>, Call(length): Call) -> Result<(), BoxError> {
    let begin = inside.now();
    let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    let id = lock(&inside.judge).begin(inside.life, begin, begin + length);
    let mut flight = Flight { inside, id, over: false };
    // By the time that it hears of the end, the provider is through with it.
    sleep(Duration::from_nanos(scale(length, flight.inside.drift) + 10_000)).await;
    flight.over = true;
    Ok(())
}

/// How a process is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It, and nothing else: when it goes on its clocks have jumped.
    Process,
    /// The machine sleeps: only the clock of the leases has jumped.
    Machine,
}

/// How a process is made.
pub struct Birth<'a> {
    pub life: Life,
    pub at: At,
    pub seed: u64,
    pub drift: i64,
    pub ceiling: u32,
    pub settings: &'a FleetSettings,
    /// Leases are held by a clock that stands still in suspend, as std's `Instant` does.
    pub sleepy_clock: bool,
    pub load: Load,
    pub outbox: &'a Arc<Mutex<Vec<Sent>>>,
    pub judge: &'a Arc<Mutex<Judge>>,
}

pub struct Process {
    inside: Arc<Inside>,
    wakes: mpsc::UnboundedSender<Option<HolderId>>,
    // Dropped in this order: a killed process says no goodbye.
    runtime: Runtime,
    provider: Provider,
    fleet: Fleet,
}

impl Process {
    pub fn new(birth: &Birth<'_>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let (wakes, receiver) = mpsc::unbounded_channel();
        let (inside, fleet, provider) = runtime.block_on(async {
            let inside = Arc::new(Inside {
                life: birth.life,
                born: birth.at,
                drift: birth.drift,
                slept: AtomicU64::new(0),
                origin: Instant::now(),
                dead: AtomicBool::new(false),
                idle: AtomicBool::new(false),
                steady: AtomicBool::new(false),
                outbox: birth.outbox.clone(),
                judge: birth.judge.clone(),
            });
            let line = Line { inside: inside.clone(), wakes: Mutex::new(Some(receiver)) };
            let mut settings = birth.settings.clone().on_this_runtime();
            if !birth.sleepy_clock {
                let inside = inside.clone();
                // Somewhere in the machine's life, and each machine elsewhere.
                let since_boot = birth.seed % 1_000_000_000_000_000;
                settings = settings
                    .lease_clock(move || Duration::from_nanos(since_boot.saturating_add(inside.elapsed())));
            }
            let fleet = Fleet::shared(line, settings).expect("settings that can be").seed(birth.seed);
            let limits = ProviderSettings::new().ceiling(birth.ceiling).queue(40).aborts(true);
            let provider = fleet.configure(PROVIDER, limits).expect("settings that can be");
            tokio::spawn(agents(inside.clone(), provider.clone(), birth.load, Rng::with_seed(!birth.seed)));
            (inside, fleet, provider)
        });
        Process { inside, wakes, runtime, provider, fleet }
    }

    pub fn life(&self) -> Life {
        self.inside.life
    }

    /// Lives on until this time of the world.
    pub fn run(&self, until: At) {
        let own = self.inside.own(until).saturating_sub(self.inside.slept.load(Relaxed));
        let until = self.inside.origin + Duration::from_nanos(own);
        self.runtime.block_on(async { sleep_until(until).await });
    }

    /// It was stopped until now.
    pub fn resume(&self, stop: Stop, at: At) {
        self.runtime.block_on(async {
            let missed = self.inside.own(at).saturating_sub(self.inside.elapsed());
            match stop {
                Stop::Process => advance(Duration::from_nanos(missed)).await,
                Stop::Machine => drop(self.inside.slept.fetch_add(missed, Relaxed)),
            }
        });
    }

    pub fn wake(&self, holder: Option<HolderId>) {
        // One that has lost its task has lost its wake-ups.
        self.wakes.send(holder).ok();
    }

    /// Nothing of it is ever run again.
    pub fn kill(self) {
        self.inside.dead.store(true, Relaxed);
    }

    /// Its agents have no more work.
    pub fn idle(&self) {
        self.inside.idle.store(true, Relaxed);
    }

    /// Its agents have work all the time.
    pub fn steady(&self) {
        self.inside.steady.store(true, Relaxed);
    }

    /// Says goodbye.
    pub fn leave(&self) {
        let fleet = self.fleet.clone();
        self.runtime.spawn(async move { fleet.leave().await });
    }

    pub fn with<R>(&self, with: impl FnOnce(&Provider) -> R) -> R {
        let _entered = self.runtime.enter();
        with(&self.provider)
    }
}

async fn agents(inside: Arc<Inside>, provider: Provider, load: Load, mut rng: Rng) {
    let calls = {
        let inside = inside.clone();
        let service = service_fn(move |call: Call| work(inside.clone(), call));
        FleetLimitLayer::with(&provider, Good).until_reply().patience(Duration::from_secs(8)).layer(service)
    };
    /// How often they look whether anything has changed.
    const LOOK: Duration = Duration::from_millis(300);
    let mut busy = rng.bool();
    let mut turns = Instant::now() + millis(rng.u64(2000..15_000));
    loop {
        let steady = inside.steady.load(Relaxed);
        let rate = match (steady, busy) {
            (true, _) => load.steady,
            (false, true) => load.rate,
            (false, false) => load.rate / 20.0,
        };
        let wait = Duration::try_from_secs_f64(-(1.0 - rng.f64()).ln() / rate).unwrap_or(LOOK);
        sleep(wait.min(LOOK)).await;
        if Instant::now() >= turns {
            busy = !busy;
            turns = Instant::now() + millis(rng.u64(2000..15_000));
        }
        if inside.idle.load(Relaxed) {
            return;
        }
        // The time until the next call does not depend on how long none has come.
        if wait > LOOK {
            continue;
        }
        let most = if rng.u32(..5) == 0 { load.longest } else { load.usual };
        let most = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        let call = calls.clone().oneshot(Call(millis(rng.u64(20..=most))));
        if rng.u32(..1000) < load.given_up {
            let patience = millis(rng.u64(..3000));
            tokio::spawn(async move { drop(timeout(patience, call).await) });
        } else {
            tokio::spawn(async move { drop(call.await) });
        }
    }
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// What a lost connection says, where it says anything.
pub fn unreachable() -> StoreError {
    StoreError::from(StoreErrorKind::Unreachable)
}
