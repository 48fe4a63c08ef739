//! What it costs to be one of a fleet: an admission on a lease beside a semaphore on Redis and tokio's own, calls to
//! the store, the server's time for each of them, the way of a slot from one process to another, and calls while
//! the store is down.
//!
//! ```text
//! cargo bench --bench fleet                       # all: about three minutes once it is built
//! cargo bench --bench fleet -- admission outage   # these: admission calls server handoff outage
//! ```
//!
//! It needs a Redis: that of `REDIS_URL`, or else it starts a redis-server of its own from `PATH`. Processes are
//! fleets with runtimes and threads of their own here; to the store that is no difference.
//!
//! Times depend on the machine and on who else uses it. What is compared is measured in turns within one run, several
//! times, and the best of the medians counts: what others do on the machine only ever adds.

use fastrand::Rng;
use redis::{AsyncConnectionConfig, Script, aio::MultiplexedConnection};
use std::{
    convert::Infallible,
    error::Error,
    fs,
    future::{Future, Ready, ready},
    hint::black_box,
    net::Ipv4Addr,
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    thread,
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::{self, Runtime},
    sync::{Semaphore, watch},
    time::{Instant, sleep, timeout},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_herd::{
    BoxError, Classify, Fleet, FleetLimitLayer, Kind, Provider, ProviderSettings, Signal,
    store::{Epoch, FleetSettings, FleetStore, HolderId, LeaseState, Limits, Outage, Report},
};
use tower_herd_redis::{RedisConfig, RedisStore};

type Outcome<T> = Result<T, BoxError>;

/// The tasks of the first comparison, and the threads that they run on.
const TASKS: usize = 64;
const THREADS: usize = 2;
/// The ceiling of all that is compared there: nobody has to wait for a slot.
const CEILING: u32 = 64;

const SECTIONS: [&str; 5] = ["admission", "calls", "server", "handoff", "outage"];

fn main() -> ExitCode {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if let Some(unknown) = chosen.iter().find(|word| !SECTIONS.contains(&word.as_str())) {
        eprintln!("no section is called {unknown}; there are: {}", SECTIONS.join(" "));
        return ExitCode::from(2);
    }
    match run(|section| chosen.is_empty() || chosen.iter().any(|word| word == section)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(is_chosen: impl Fn(&str) -> bool) -> Outcome<()> {
    let server = Server::find()?;
    let runtime = runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    let _context = runtime.enter();
    let version = runtime.block_on(server.info("server", "redis_version"))?;
    println!(
        "redis {version}, {}\n",
        if server.child.is_some() { "started here" } else { "that of REDIS_URL" }
    );
    if is_chosen("admission") {
        admission(&runtime, &server)?;
    }
    if is_chosen("calls") {
        calls(&runtime, &server)?;
    }
    if is_chosen("server") {
        runtime.block_on(server_time(&server))?;
    }
    if is_chosen("handoff") {
        handoff(&runtime, &server)?;
    }
    if is_chosen("outage") {
        outage(&runtime, &server)?;
    }
    Ok(())
}

fn verdict(holds: bool) -> &'static str {
    if holds { "ok" } else { "MISSED" }
}

// -------------------------------------------------------------------------------------------- the server

/// The Redis of this run. What was started here is stopped when this is dropped.
struct Server {
    url: String,
    child: Option<Child>,
    folder: Option<PathBuf>,
}

impl Server {
    fn find() -> Outcome<Self> {
        if let Ok(url) = std::env::var("REDIS_URL") {
            return Ok(Server { url, child: None, folder: None });
        }
        let folder = std::env::temp_dir().join(format!("herd-bench-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let mut server = Server { url: String::new(), child: None, folder: Some(folder.clone()) };
        for _ in 0..5 {
            let port = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            let child = Command::new("redis-server")
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
                .args(["--daemonize", "no", "--pidfile"])
                .arg(folder.join("redis.pid"))
                .arg("--dir")
                .arg(&folder)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .map_err(|error| {
                    format!(
                        "no Redis: REDIS_URL is not set, and redis-server (Debian: redis-server) cannot be started \
                         from PATH: {error}"
                    )
                })?;
            server.child = Some(child);
            server.url = format!("redis://127.0.0.1:{port}/");
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            if runtime.block_on(server.answers()) {
                return Ok(server);
            }
            server.stop();
        }
        Err("redis-server does not start".into())
    }

    async fn answers(&self) -> bool {
        for _ in 0..200 {
            if let Ok(connection) = self.connect().await {
                let mut connection = connection;
                return redis::cmd("PING").query_async::<()>(&mut connection).await.is_ok();
            }
            sleep(Duration::from_millis(25)).await;
        }
        false
    }

    async fn connect(&self) -> Outcome<MultiplexedConnection> {
        let client = redis::Client::open(self.url.as_str())?;
        // Patient: on a busy machine the naive semaphore is slow, and that is no error.
        let wait = Some(Duration::from_secs(10));
        let config = AsyncConnectionConfig::new().set_connection_timeout(wait).set_response_timeout(wait);
        Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
    }

    /// A field of `INFO`, or all that stands behind its colon.
    async fn info(&self, section: &str, field: &str) -> Outcome<String> {
        let mut connection = self.connect().await?;
        let info: String = redis::cmd("INFO").arg(section).query_async(&mut connection).await?;
        let line = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        Ok(line.unwrap_or_default().trim().to_owned())
    }

    /// How often scripts ran by their hash, and the microseconds that this took the server.
    async fn scripts(&self) -> Outcome<(u64, u64)> {
        let stats = self.info("commandstats", "cmdstat_evalsha").await?;
        let part = |name: &str| {
            let text = stats.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
            text.and_then(|text| text.parse().ok()).unwrap_or_default()
        };
        Ok((part("calls"), part("usec")))
    }

    fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        if let Some(folder) = &self.folder {
            fs::remove_dir_all(folder).ok();
        }
    }
}

// -------------------------------------------------------------------------------------------- the fleets

/// A name that no other run has used: the store may be somebody's.
fn named(what: &str) -> String {
    format!("bench-{}-{what}", std::process::id())
}

fn fleet(url: &str, settings: FleetSettings) -> Outcome<Fleet> {
    Ok(Fleet::shared(RedisStore::new(RedisConfig::single(url)?)?, settings)?)
}

/// Until its lease is there, and the store has learned who else there is.
async fn settled(provider: &Provider) -> Outcome<()> {
    let held = async {
        while provider.lease().is_none_or(|lease| lease.state != LeaseState::Held || lease.slots == 0) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(30), held)
        .await
        .map_err(|_| format!("no lease after half a minute: {:?}", provider.lease()).into())
}

/// A number is a success, whichever it is.
#[derive(Clone, Copy, Debug)]
struct Numbers;

impl Classify<u64> for Numbers {
    #[inline]
    fn classify(&self, outcome: Result<&u64, &(dyn Error + 'static)>) -> Signal {
        Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
    }
}

/// Ready at once.
#[derive(Clone, Copy, Debug)]
struct Inner;

impl Service<u64> for Inner {
    type Response = u64;
    type Error = Infallible;
    type Future = Ready<Result<u64, Infallible>>;
    #[inline]
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    #[inline(never)]
    fn call(&mut self, request: u64) -> Self::Future {
        ready(Ok(black_box(request)))
    }
}

fn limit<S>(
    provider: &Provider,
    inner: S,
) -> tower_herd::fleet_limit::FleetLimit<S, tower_herd::fleet_limit::UntilReply, Numbers> {
    FleetLimitLayer::new(provider).until_reply().classify(Numbers).layer(inner)
}

// ----------------------------------------------------------------------------------------------- figures

/// Of samples that need not be in order.
fn quantile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let at = ((samples.len() as f64 * share) as usize).min(samples.len().saturating_sub(1));
    samples.get(at).copied().unwrap_or(f64::NAN)
}

fn best(medians: &[f64]) -> f64 {
    medians.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Nanoseconds a turn.
fn nanos(turns: u64, took: Duration) -> f64 {
    took.as_nanos() as f64 / turns as f64
}

// --------------------------------------------------------------------------------------------- admission

const ACQUIRE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[1])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('ZADD', KEYS[1], now, ARGV[3])
  return 1
end
return 0";

/// The semaphore that everybody writes first: a sorted set, asked for each call.
#[derive(Clone)]
struct Naive {
    connection: MultiplexedConnection,
    acquire: Arc<Script>,
    key: Arc<str>,
}

impl Naive {
    async fn new(server: &Server) -> Outcome<Self> {
        let connection = server.connect().await?;
        Ok(Naive { connection, acquire: Arc::new(Script::new(ACQUIRE)), key: named("naive").into() })
    }

    async fn call(&mut self, id: &str) -> Outcome<()> {
        let mut acquire = self.acquire.key(&*self.key);
        acquire.arg(60_000).arg(CEILING).arg(id);
        let got: u32 = acquire.invoke_async(&mut self.connection).await?;
        if got == 0 {
            return Err("there are as many slots as tasks".into());
        }
        Ok(redis::cmd("ZREM").arg(&*self.key).arg(id).query_async(&mut self.connection).await?)
    }
}

/// Turns a second of `TASKS` tasks on `THREADS` threads.
async fn rate<F, W>(time: Duration, work: W) -> Outcome<f64>
where
    W: Fn(usize, Arc<AtomicBool>) -> F,
    F: Future<Output = Outcome<u64>> + Send + 'static,
{
    let over = Arc::new(AtomicBool::new(false));
    let began = Instant::now();
    let tasks: Vec<_> = (0..TASKS).map(|task| tokio::spawn(work(task, over.clone()))).collect();
    sleep(time).await;
    over.store(true, Relaxed);
    let mut turns = 0;
    for task in tasks {
        turns += task.await??;
    }
    Ok(turns as f64 / began.elapsed().as_secs_f64())
}

/// How often a task that never waits lets others run.
const YIELD: u64 = 64;

async fn ours(mut service: impl Service<u64, Error: Into<BoxError>>, over: Arc<AtomicBool>) -> Outcome<u64> {
    let mut turns = 0;
    while !over.load(Relaxed) {
        for _ in 0..YIELD {
            turns += 1;
            service.ready().await.map_err(Into::into)?.call(turns).await.map_err(Into::into)?;
        }
        tokio::task::yield_now().await;
    }
    Ok(turns)
}

async fn one_by_one(mut naive: Naive, task: usize, over: Arc<AtomicBool>) -> Outcome<u64> {
    let mut turns = 0;
    while !over.load(Relaxed) {
        turns += 1;
        naive.call(&format!("{task}:{turns}")).await?;
    }
    Ok(turns)
}

async fn tried(semaphore: Arc<Semaphore>, over: Arc<AtomicBool>) -> Outcome<u64> {
    let mut turns = 0;
    while !over.load(Relaxed) {
        for _ in 0..YIELD {
            turns += 1;
            drop(black_box(semaphore.try_acquire()?));
        }
        tokio::task::yield_now().await;
    }
    Ok(turns)
}

async fn acquired(semaphore: Arc<Semaphore>, over: Arc<AtomicBool>) -> Outcome<u64> {
    let mut turns = 0;
    while !over.load(Relaxed) {
        for _ in 0..YIELD {
            turns += 1;
            drop(black_box(semaphore.acquire().await?));
        }
        tokio::task::yield_now().await;
    }
    Ok(turns)
}

fn admission(runtime: &Runtime, server: &Server) -> Outcome<()> {
    println!("## Admission and return\n");
    let leased = fleet(&server.url, FleetSettings::new())?
        .configure(&named("admission"), ProviderSettings::new().ceiling(CEILING))?;
    runtime.block_on(settled(&leased))?;
    throughput(runtime, server, &leased)?;
    cost(&leased)
}

/// All four in turns.
fn throughput(runtime: &Runtime, server: &Server, leased: &Provider) -> Outcome<()> {
    const ROUNDS: usize = 5;
    const TIME: Duration = Duration::from_secs(1);
    let naive = runtime.block_on(Naive::new(server))?;
    let semaphore = Arc::new(Semaphore::new(CEILING as usize));
    let service = limit(leased, Inner);
    let mut rates = [const { Vec::new() }; 4];
    let (mut admissions, mut scripts, mut seconds) = (0.0, 0, 0.0);
    for _ in 0..ROUNDS {
        let run = async {
            rates[0].push(rate(TIME, |task, over| one_by_one(naive.clone(), task, over)).await?);
            let (before, began) = (server.scripts().await?.0, Instant::now());
            let rate_of_ours = rate(TIME, |_, over| ours(service.clone(), over)).await?;
            seconds += began.elapsed().as_secs_f64();
            scripts += server.scripts().await?.0 - before;
            admissions += rate_of_ours * TIME.as_secs_f64();
            rates[1].push(rate_of_ours);
            rates[2].push(rate(TIME, |_, over| tried(semaphore.clone(), over)).await?);
            rates[3].push(rate(TIME, |_, over| acquired(semaphore.clone(), over)).await?);
            Outcome::Ok(())
        };
        runtime.block_on(run)?;
    }
    let ratios: Vec<f64> = rates[1].iter().zip(&rates[0]).map(|(ours, naive)| ours / naive).collect();
    let medians = rates.each_mut().map(|rates| quantile(rates, 0.5));
    let bests = rates.each_ref().map(|rates| rates.iter().copied().fold(0.0, f64::max));
    println!("{TASKS} tasks on {THREADS} threads, {ROUNDS} rounds in turns, thousands a second:\n");
    println!("| what | median | best | of the naive one (best) |");
    println!("|---|--:|--:|--:|");
    let names = [
        "naive: a sorted set on Redis, loopback, one connection",
        "`FleetLimitLayer` on a lease",
        "tokio's Semaphore, `try_acquire`",
        "tokio's Semaphore, `acquire().await`",
    ];
    for ((name, median), best) in names.iter().zip(medians).zip(bests) {
        println!("| {name} | {:.1} | {:.1} | {:.0} |", median / 1e3, best / 1e3, best / bests[0]);
    }
    let ratio = quantile(&mut ratios.clone(), 0.5);
    let shown: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.0}")).collect();
    println!(
        "\nOf the naive one, round by round: {} (bar: >= 200: {})",
        shown.join(", "),
        verdict(ratio >= 200.0)
    );
    // The lease is kept meanwhile: that is all there is.
    println!(
        "Calls to the store while {:.1} million were admitted in {seconds:.1} s: {scripts}, {:.1} a second; that is \
         {:.7} for each (bar: no round trip a call: {})\n",
        admissions / 1e6,
        scripts as f64 / seconds,
        scripts as f64 / admissions,
        verdict(scripts as f64 <= 2.0 * seconds + 8.0)
    );
    Ok(())
}

/// What a call costs on one thread, over the same call without the layer.
fn cost(leased: &Provider) -> Outcome<()> {
    const ROUNDS: usize = 7;
    const SAMPLES: usize = 41;
    const CALLS: u64 = 20_000;
    let runtime = runtime::Builder::new_current_thread().enable_time().build()?;
    let alone = Fleet::local().configure("alone", ProviderSettings::new().ceiling(CEILING))?;
    let (mut bare, mut unleased, mut leased) = (Inner, limit(&alone, Inner), limit(leased, Inner));
    let semaphore = Semaphore::new(CEILING as usize);
    let mut medians = [const { Vec::new() }; 5];
    let mut fast: [Vec<f64>; 5] = [const { Vec::new() }; 5];
    for _ in 0..ROUNDS {
        let mut samples = [const { Vec::new() }; 5];
        for _ in 0..SAMPLES {
            samples[0].push(runtime.block_on(many(&mut bare, CALLS))?);
            samples[1].push(runtime.block_on(many(&mut unleased, CALLS))?);
            samples[2].push(runtime.block_on(many(&mut leased, CALLS))?);
            let began = Instant::now();
            for _ in 0..CALLS {
                drop(black_box(semaphore.try_acquire()?));
            }
            samples[3].push(nanos(CALLS, began.elapsed()));
            let began = Instant::now();
            runtime.block_on(async {
                for _ in 0..CALLS {
                    drop(black_box(semaphore.acquire().await?));
                }
                Outcome::Ok(())
            })?;
            samples[4].push(nanos(CALLS, began.elapsed()));
        }
        for (at, samples) in samples.iter_mut().enumerate() {
            medians[at].push(quantile(samples, 0.5));
            fast[at].push(quantile(samples, 0.1));
        }
    }
    let (median, fast) = (medians.each_ref().map(|m| best(m)), fast.each_ref().map(|f| best(f)));
    println!("One task, nanoseconds a call over the bare inner service (best of {ROUNDS} medians):\n");
    println!("| what | over the bare call | fast tenth |");
    println!("|---|--:|--:|");
    println!("| `FleetLimitLayer`, no lease | {:.1} | {:.1} |", median[1] - median[0], fast[1] - fast[0]);
    println!("| `FleetLimitLayer` on a lease | {:.1} | {:.1} |", median[2] - median[0], fast[2] - fast[0]);
    println!("| tokio's Semaphore, `try_acquire` (alone) | {:.1} | {:.1} |", median[3], fast[3]);
    println!("| tokio's Semaphore, `acquire().await` (alone) | {:.1} | {:.1} |", median[4], fast[4]);
    let over = median[2] - median[0];
    println!("\nLeased admission and return: {over:.1} ns (bar: <= 60: {})\n", verdict(over <= 60.0));
    Ok(())
}

async fn many(service: &mut impl Service<u64, Error: Into<BoxError>>, calls: u64) -> Outcome<f64> {
    let began = Instant::now();
    for call in 0..calls {
        let call = black_box(call);
        black_box(service.ready().await.map_err(Into::into)?.call(call).await.map_err(Into::into)?);
    }
    Ok(nanos(calls, began.elapsed()))
}

// ------------------------------------------------------------------------------------ calls to the store

/// What one process asks for.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    tasks: usize,
    /// How long a call takes, and the rest after it, in milliseconds.
    call: u64,
    rest: u64,
}

const LOADS: [Load; 7] = [
    Load { name: "idle", tasks: 0, call: 0, rest: 0 },
    Load { name: "a tenth of the ceiling: one call of 200 ms a second", tasks: 1, call: 200, rest: 800 },
    Load { name: "half of it: calls of 100 ms", tasks: 2, call: 100, rest: 100 },
    Load { name: "four times the ceiling: calls of 500 ms", tasks: 8, call: 500, rest: 0 },
    Load { name: "four times the ceiling: calls of 50 ms", tasks: 8, call: 50, rest: 0 },
    Load { name: "four times the ceiling: calls of 1 ms", tasks: 8, call: 1, rest: 0 },
    Load { name: "bursts: eight calls of 20 ms every 2 s", tasks: 8, call: 20, rest: 1980 },
];

/// Processes of that section, and their common ceiling.
const MEMBERS: usize = 4;
const SHARED: u32 = 8;

fn calls(runtime: &Runtime, server: &Server) -> Outcome<()> {
    const WARM: Duration = Duration::from_secs(14);
    const TIME: Duration = Duration::from_secs(30);
    println!("## Calls to the store\n");
    let over = Arc::new(AtomicBool::new(false));
    let done: Arc<[AtomicU64; LOADS.len()]> = Arc::default();
    let mut threads = Vec::new();
    let mut providers = Vec::new();
    for member in 0..MEMBERS {
        let fleet = fleet(&server.url, FleetSettings::new())?;
        let mut own = Vec::new();
        for (at, load) in LOADS.iter().enumerate() {
            let settings = ProviderSettings::new().ceiling(SHARED);
            own.push((*load, fleet.configure(&named(&format!("load-{at}")), settings)?));
        }
        providers.push(own.iter().map(|(_, provider)| provider.clone()).collect::<Vec<_>>());
        let (over, done) = (over.clone(), done.clone());
        threads.push(thread::spawn(move || working(&own, member as u64, &over, &done)));
    }
    let exchanges = || -> Vec<Vec<u64>> {
        let of = |provider: &Provider| provider.lease().map_or(0, |lease| lease.exchanges);
        providers.iter().map(|own| own.iter().map(of).collect()).collect()
    };
    runtime.block_on(sleep(WARM));
    done.iter().for_each(|done| done.store(0, Relaxed));
    let (before, began) = (exchanges(), Instant::now());
    runtime.block_on(sleep(TIME));
    let (after, seconds) = (exchanges(), began.elapsed().as_secs_f64());
    over.store(true, Relaxed);
    let calls = done.each_ref().map(|done| done.load(Relaxed) as f64 / seconds);
    threads.into_iter().for_each(|thread| drop(thread.join()));
    println!(
        "{MEMBERS} processes on a ceiling of {SHARED}, all loads at once at a provider each, {seconds:.0} s:\n"
    );
    println!(
        "| load | provider calls a second | lease calls a second and process: mean | most | bar: <= 2 |"
    );
    println!("|---|--:|--:|--:|---|");
    for (at, load) in LOADS.iter().enumerate() {
        let mut rates: Vec<f64> = before
            .iter()
            .zip(&after)
            .map(|(before, after)| (after[at] - before[at]) as f64 / seconds)
            .collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let most = quantile(&mut rates, 1.0);
        println!("| {} | {:.0} | {mean:.2} | {most:.2} | {} |", load.name, calls[at], verdict(most <= 2.0));
    }
    println!();
    Ok(())
}

/// The application of one process, which counts its calls by load.
fn working(loads: &[(Load, Provider)], seed: u64, over: &AtomicBool, done: &Arc<[AtomicU64; LOADS.len()]>) {
    let Ok(runtime) = runtime::Builder::new_current_thread().enable_all().build() else { return };
    let mut random = Rng::with_seed(seed);
    runtime.block_on(async {
        let mut tasks = Vec::new();
        for (at, (load, provider)) in loads.iter().enumerate() {
            let first = Duration::from_millis(random.u64(0..=(load.call + load.rest)));
            for _ in 0..load.tasks {
                let (load, done) = (*load, done.clone());
                let service = limit(
                    provider,
                    service_fn(move |n: u64| async move {
                        sleep(Duration::from_millis(load.call)).await;
                        Ok::<_, Infallible>(n)
                    }),
                );
                tasks.push(tokio::spawn(async move {
                    sleep(first).await;
                    loop {
                        if service.clone().oneshot(1).await.is_ok() {
                            done[at].fetch_add(1, Relaxed);
                        }
                        sleep(Duration::from_millis(load.rest)).await;
                    }
                }));
            }
        }
        while !over.load(Relaxed) {
            sleep(Duration::from_millis(50)).await;
        }
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    });
}

// -------------------------------------------------------------------------------------- the server's time

/// A provider that is shared by many.
struct Crowd {
    provider: String,
    next: usize,
    members: Vec<Member>,
    random: Rng,
}

struct Member {
    holder: HolderId,
    seq: u64,
    epoch: Option<Epoch>,
    version: u64,
    slots: u32,
}

impl Crowd {
    fn new(many: usize) -> Self {
        let mut random = Rng::with_seed(many as u64);
        let member = |_| {
            let holder = HolderId(random.u128(..));
            Member { holder, seq: 0, epoch: None, version: 0, slots: 0 }
        };
        let members = (0..many).map(member).collect();
        Crowd { provider: named(&format!("crowd-{many}")), next: 0, members, random }
    }

    /// The next of them reports. It needs another number of slots each time: half of the time there are too few.
    async fn exchange(&mut self, store: &RedisStore) -> Outcome<u64> {
        let ceiling = u32::try_from(self.members.len() * 2)?;
        let at = self.next % self.members.len();
        self.next += 1;
        let need = self.random.u32(0..=4);
        let offer = Epoch(self.random.u64(..));
        let member = &mut self.members[at];
        member.seq += 1;
        let held = member.slots.min(need);
        let limits = Limits { start: ceiling, ceiling: Some(ceiling), ..Limits::default() };
        let report = Report {
            label: format!("member {at}"),
            seq: member.seq,
            epoch: member.epoch,
            version: member.version,
            held,
            busy: held,
            need,
            headroom: need + 1,
            limits,
            ..Report::new(member.holder, offer)
        };
        let grant = store.exchange(&self.provider, &report).await?;
        (member.epoch, member.version, member.slots) = (Some(grant.epoch), grant.version, grant.slots);
        Ok(grant.learning)
    }
}

async fn server_time(server: &Server) -> Outcome<()> {
    const ROUNDS: usize = 5;
    const CALLS: usize = 400;
    println!("## The server's time for a lease call\n");
    let store = RedisStore::open(&server.url)?;
    let mut crowds = [3, 50, 200, 1000].map(Crowd::new);
    // Everybody joins, and a new book learns for ten seconds: silence would prolong that.
    let mut learning = [true; 4];
    let began = Instant::now();
    while learning.contains(&true) {
        for (crowd, learning) in crowds.iter_mut().zip(&mut learning) {
            let mut left = 0;
            for _ in 0..crowd.members.len().clamp(1, 250) {
                left = crowd.exchange(&store).await?;
            }
            *learning = left > 0;
        }
        if began.elapsed() > Duration::from_secs(120) {
            return Err("the store learns for two minutes and has not done".into());
        }
        sleep(Duration::from_millis(100)).await;
    }
    let mut medians = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for (at, crowd) in crowds.iter_mut().enumerate() {
            let before = server.scripts().await?;
            for _ in 0..CALLS {
                crowd.exchange(&store).await?;
            }
            let after = server.scripts().await?;
            medians[at].push((after.1 - before.1) as f64 / (after.0 - before.0) as f64);
        }
    }
    println!(
        "Needs that change with each call, 2 slots for each holder; best of {ROUNDS} means over {CALLS} calls:\n"
    );
    println!("| holders | microseconds a call |");
    println!("|--:|--:|");
    for (crowd, medians) in crowds.iter().zip(&medians) {
        println!("| {} | {:.0} |", crowd.members.len(), best(medians));
    }
    println!();
    Ok(())
}

// ------------------------------------------------------------------------------------------------ hand-off

/// Who had a slot last, and when it was given back.
#[derive(Default)]
struct Baton(Mutex<Option<(usize, Instant)>>);

impl Baton {
    fn give(&self, me: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((me, Instant::now()));
    }
    fn take(&self, me: usize) -> Option<Duration> {
        let (from, at) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        (from != me).then(|| at.elapsed())
    }
}

fn handoff(runtime: &Runtime, server: &Server) -> Outcome<()> {
    /// Slots, each a provider with a ceiling of one.
    const SLOTS: usize = 16;
    const TIME: Duration = Duration::from_secs(40);
    println!("## From one process to another\n");
    let took = Arc::new(Mutex::new(Vec::new()));
    let batons: Arc<Vec<Baton>> = Arc::new((0..SLOTS).map(|_| Baton::default()).collect());
    let over = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for member in 0..2 {
        let fleet = fleet(&server.url, FleetSettings::new())?;
        let slots = (0..SLOTS)
            .map(|at| fleet.configure(&named(&format!("slot-{at}")), ProviderSettings::new().ceiling(1)));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        let (took, batons, over) = (took.clone(), batons.clone(), over.clone());
        threads.push(thread::spawn(move || {
            let Ok(runtime) = runtime::Builder::new_current_thread().enable_all().build() else { return };
            runtime.block_on(async {
                for (at, provider) in slots.into_iter().enumerate() {
                    tokio::spawn(passing(provider, at, member, batons.clone(), took.clone()));
                }
                while !over.load(Relaxed) {
                    sleep(Duration::from_millis(50)).await;
                }
            });
        }));
    }
    runtime.block_on(sleep(TIME));
    over.store(true, Relaxed);
    for thread in threads {
        thread.join().ok();
    }
    let mut took = took.lock().unwrap_or_else(PoisonError::into_inner);
    println!(
        "Two processes take turns at each of {SLOTS} slots; from the end of a call in one to the start of the next in \
         the other, {} times: p50 {:.0} us, p90 {:.0} us, p99 {:.0} us\n",
        took.len(),
        quantile(&mut took, 0.5),
        quantile(&mut took, 0.9),
        quantile(&mut took, 0.99),
    );
    Ok(())
}

/// Calls at the one slot of a provider, one after the other.
async fn passing(
    provider: Provider,
    at: usize,
    member: usize,
    batons: Arc<Vec<Baton>>,
    took: Arc<Mutex<Vec<f64>>>,
) {
    let mut random = Rng::with_seed((at * 2 + member) as u64);
    let inner = service_fn(move |hold: u64| {
        let (batons, took) = (batons.clone(), took.clone());
        // As soon as the call is made: the time that it is on its way is the provider's.
        if let Some(waited) = batons[at].take(member) {
            let mut took = took.lock().unwrap_or_else(PoisonError::into_inner);
            took.push(waited.as_nanos() as f64 / 1e3);
        }
        async move {
            sleep(Duration::from_millis(hold)).await;
            batons[at].give(member);
            Ok::<_, Infallible>(hold)
        }
    });
    let service = limit(&provider, inner);
    loop {
        // Longer than a slot is kept at least, and than two lease calls a second allow.
        drop(service.clone().oneshot(random.u64(1500..2500)).await);
    }
}

// ------------------------------------------------------------------------------------------------- outage

/// What stands between a fleet and its store.
#[derive(Clone, Copy, PartialEq)]
enum Line {
    Open,
    /// It takes everything and answers nothing.
    Hangs,
    /// It closes connections as soon as they are there.
    Gone,
}

/// Forwards to the server as long as it is open.
async fn forward(listener: TcpListener, to: String, line: watch::Receiver<Line>) {
    while let Ok((mut near, _)) = listener.accept().await {
        let (to, mut line) = (to.clone(), line.clone());
        tokio::spawn(async move {
            if *line.borrow_and_update() == Line::Gone {
                return;
            }
            let Ok(mut far) = TcpStream::connect(to).await else { return };
            if *line.borrow() == Line::Open {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                    _ = line.wait_for(|line| *line != Line::Open) => {}
                }
            }
            // Both stay as they are until the line is gone or open again.
            line.wait_for(|line| *line != Line::Hangs).await.ok();
        });
    }
}

fn outage(runtime: &Runtime, server: &Server) -> Outcome<()> {
    println!("## Calls while the store is down\n");
    let client = redis::Client::open(server.url.as_str())?;
    let redis::ConnectionAddr::Tcp(host, port) = client.get_connection_info().addr() else {
        return Err("this section needs a server behind TCP without TLS".into());
    };
    let (set, line) = watch::channel(Line::Open);
    let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
    let url = format!("redis://127.0.0.1:{}/", listener.local_addr()?.port());
    let forwarder = runtime.spawn(forward(listener, format!("{host}:{port}"), line));
    println!(
        "A call is admitted, refused for want of a slot (patience 0), or an error; microseconds for each:\n"
    );
    println!(
        "| policy | store | calls | refused | other errors | p50 | p99 | p99.9 | most | bar: p99 < 1000 |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|---|");
    for (name, policy) in [("`Keep(0.5)`", Outage::Keep(0.5)), ("`Stop`", Outage::Stop)] {
        let provider = fleet(&url, FleetSettings::new().outage(policy))?
            .configure(&named(&format!("outage-{name}")), ProviderSettings::new().ceiling(CEILING))?;
        runtime.block_on(settled(&provider))?;
        for (store, state, time) in [
            ("there", Line::Open, 3),
            ("hangs", Line::Hangs, 10),
            ("hangs, the lease has run out", Line::Hangs, 5),
            ("refuses connections", Line::Gone, 5),
            ("there again", Line::Open, 3),
        ] {
            set.send_replace(state);
            let mut seen = timed_calls(&provider, Duration::from_secs(time))?;
            let p99 = quantile(&mut seen.micros, 0.99);
            println!(
                "| {name} | {store} | {} | {} | {} | {:.2} | {p99:.2} | {:.2} | {:.0} | {} |",
                seen.micros.len(),
                seen.refused,
                seen.errors,
                quantile(&mut seen.micros, 0.5),
                quantile(&mut seen.micros, 0.999),
                quantile(&mut seen.micros, 1.0),
                verdict(p99 < 1000.0 && seen.errors == 0),
            );
        }
    }
    forwarder.abort();
    println!();
    Ok(())
}

#[derive(Default)]
struct Seen {
    micros: Vec<f64>,
    refused: u64,
    errors: u64,
}

/// Calls one after the other from one thread, a thousand a second or so.
fn timed_calls(provider: &Provider, time: Duration) -> Outcome<Seen> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let layer = FleetLimitLayer::new(provider).until_reply().classify(Numbers).patience(Duration::ZERO);
    let mut service = layer.layer(Inner);
    let mut seen = Seen::default();
    runtime.block_on(async {
        let end = Instant::now() + time;
        while Instant::now() < end {
            for _ in 0..20 {
                let began = Instant::now();
                let reply = match service.ready().await {
                    Ok(service) => service.call(1).await,
                    Err(error) => Err(error),
                };
                seen.micros.push(began.elapsed().as_nanos() as f64 / 1e3);
                match reply {
                    Ok(_) => {}
                    Err(error) if tower_herd::Refusal::find(&*error).is_some() => seen.refused += 1,
                    Err(_) => seen.errors += 1,
                }
            }
            sleep(Duration::from_millis(2)).await;
        }
    });
    Ok(seen)
}
