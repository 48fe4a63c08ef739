//! One process of the fleet: this test program, run again.

use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io::BufRead as _,
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, watch},
    time::{Instant, sleep},
};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};
use tower_herd::{
    ClassifyLayer, Fleet, FleetLimitLayer, Provider, ProviderSettings, Refusal, RetryAfterLayer, TaskLayer,
    observe::{Event, Observe},
    store::{FleetSettings, Outage},
};
use tower_herd_redis::{RedisConfig, RedisStore};

/// The environment variable that makes a worker of this program, with its [`Plan`].
pub(crate) const PLAN: &str = "HERD_FAULTS_WORKER";
/// What an answer begins with: the test harness writes to the same output.
pub(crate) const MARK: char = '@';

/// What a worker is to be. Times in milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) store: String,
    /// The port of the provider, and its name.
    pub(crate) port: u16,
    pub(crate) provider: String,
    pub(crate) ceiling: u32,
    pub(crate) generation: u64,
    pub(crate) weight: u32,
    pub(crate) load: Load,
    pub(crate) outage: Policy,
    /// The longest call, in strict mode.
    pub(crate) strict: Option<u64>,
    pub(crate) ttl: u64,
    pub(crate) renew: u64,
    pub(crate) gap: u64,
    pub(crate) grace: u64,
    pub(crate) answer_within: u64,
    /// For a slot.
    pub(crate) patience: u64,
    /// Everything is drawn from this seed, its own name too; and the lease is kept on the runtime of the calls.
    pub(crate) seed: Option<u64>,
}

/// So many callers at once, each of which calls again and again, for so many milliseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) callers: u32,
    pub(crate) hold: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Policy {
    Stop,
    Keep(f64),
    Local(u32),
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    Status,
    Load(Load),
    /// Other limits, as by an operator.
    Limits {
        ceiling: u32,
        generation: u64,
    },
    /// Its runtime does nothing for so long.
    Block(u64),
    /// It says goodbye.
    Leave,
    /// Its runtime ends with all calls in flight, and the process goes on without one.
    EndRuntime,
}

/// How a worker stands by its own word: never what a test judges by.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) state: String,
    pub(crate) slots: u32,
    pub(crate) ceiling: u32,
    pub(crate) members: u32,
    pub(crate) overshoot: u32,
    pub(crate) exchanges: u64,
    pub(crate) in_flight: u32,
    pub(crate) paused: bool,
    /// Leases that were lost.
    pub(crate) lost: u64,
    /// Calls by their end: `200`, `429`, the kind of a refusal, and what went wrong otherwise.
    pub(crate) ends: BTreeMap<String, u64>,
    /// Exchanges that failed, by kind.
    pub(crate) errors: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Default)]
struct Tally(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    ends: BTreeMap<String, u64>,
    errors: BTreeMap<String, u64>,
    lost: u64,
}

impl Tally {
    fn change(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Observe for Tally {
    fn observe(&self, event: &Event<'_>) {
        if let Event::Lease { error, .. } = event {
            self.change(|counts| match error {
                Some(error) => *counts.errors.entry(error.kind().as_str().to_owned()).or_default() += 1,
                None => counts.lost += 1,
            });
        }
    }
}

#[test]
#[ignore = "is no test: the others run it as their worker processes"]
fn worker() {
    let plan = std::env::var(PLAN).expect("it is run by the other tests");
    let plan: Plan = serde_json::from_str(&plan).unwrap();
    // Stopped or not, it does not outlive a test that was killed.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let (sender, commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            sender.send(serde_json::from_str(&line).unwrap()).ok();
        }
        // The test has dropped it.
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work(plan, commands));
    drop(runtime);
    loop {
        std::thread::park();
    }
}

async fn work(plan: Plan, mut commands: mpsc::UnboundedReceiver<Command>) {
    let tally = Tally::default();
    let (fleet, provider) = join(&plan, &tally);
    let (load, loads) = watch::channel(plan.load);
    /// The most callers.
    const MOST: u32 = 64;
    for place in 0..MOST {
        tokio::spawn(call_on(plan.clone(), place, provider.clone(), loads.clone(), tally.clone()));
    }
    while let Some(command) = commands.recv().await {
        match command {
            Command::Status => {}
            Command::Load(new) => drop(load.send_replace(new)),
            Command::Limits { ceiling, generation } => {
                provider.reconfigure(limits(ceiling, generation)).unwrap();
            }
            Command::Block(millis) => {
                #[expect(clippy::disallowed_methods, reason = "to block the runtime is what it is for")]
                std::thread::sleep(Duration::from_millis(millis));
            }
            Command::Leave => fleet.leave().await,
            Command::EndRuntime => return,
        }
        println!("{MARK}{}", serde_json::to_string(&status(&provider, &tally)).unwrap());
    }
}

fn limits(ceiling: u32, generation: u64) -> ProviderSettings {
    ProviderSettings::new().ceiling(ceiling).generation(generation)
}

fn join(plan: &Plan, tally: &Tally) -> (Fleet, Provider) {
    const MS: fn(u64) -> Duration = Duration::from_millis;
    let config = RedisConfig::single(&plan.store).unwrap().response_timeout(MS(plan.answer_within));
    let mut settings = FleetSettings::new()
        .label(&plan.name)
        .weight(plan.weight)
        .ttl(MS(plan.ttl))
        .renew(MS(plan.renew))
        .gap(MS(plan.gap))
        .grace(MS(plan.grace))
        .answer_within(MS(plan.answer_within))
        .outage(match plan.outage {
            Policy::Stop => Outage::Stop,
            Policy::Keep(share) => Outage::Keep(share),
            Policy::Local(slots) => Outage::Local(slots),
        });
    if let Some(longest) = plan.strict {
        settings = settings.strict(MS(longest));
    }
    if plan.seed.is_some() {
        settings = settings.on_this_runtime();
    }
    let fleet = Fleet::shared(RedisStore::new(config).unwrap(), settings).unwrap();
    let mut fleet = fleet.observer(tally.clone());
    if let Some(seed) = plan.seed {
        fleet = fleet.seed(seed);
    }
    let provider = fleet.configure(&plan.provider, limits(plan.ceiling, plan.generation)).unwrap();
    (fleet, provider)
}

/// One caller.
async fn call_on(plan: Plan, place: u32, provider: Provider, mut loads: watch::Receiver<Load>, tally: Tally) {
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(600)))
        .layer(RetryAfterLayer::new(&provider))
        .layer(FleetLimitLayer::new(&provider).patience(Duration::from_millis(plan.patience)))
        .layer(ClassifyLayer::new(&provider))
        .service(service_fn(|request: http::Request<String>| wire(plan.port, request)));
    while let Ok(Load { hold, .. }) = loads.wait_for(|load| place < load.callers).await.map(|load| *load) {
        let path = format!("/{}/{hold}", plan.name);
        let request = http::Request::get(path).body(String::new()).unwrap();
        let end = match service.clone().oneshot(request).await {
            Ok(reply) => reply.status().as_u16().to_string(),
            Err(error) => match Refusal::find(&*error) {
                Some(refusal) => refusal.kind.as_str().to_owned(),
                None => format!("{error:?}"),
            },
        };
        let refused = end != "200";
        tally.change(|counts| *counts.ends.entry(end).or_default() += 1);
        if refused {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// One call, on a connection of its own: the kernel closes it with the process.
async fn wire(port: u16, request: http::Request<String>) -> std::io::Result<http::Response<String>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.write_all(format!("GET {} HTTP/1.1\r\n\r\n", request.uri()).as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let mut lines = text.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).ok_or_else(invalid)?;
    let mut reply = http::Response::builder().status(status);
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        reply = reply.header(name, value);
    }
    reply.body(String::new()).map_err(|_| invalid())
}

fn status(provider: &Provider, tally: &Tally) -> Status {
    let lease = provider.lease().expect("its fleet has a store");
    let mut status = Status {
        state: format!("{:?}", lease.state),
        slots: lease.slots,
        ceiling: lease.ceiling,
        members: lease.members,
        overshoot: lease.overshoot_possible,
        exchanges: lease.exchanges,
        in_flight: provider.in_flight(),
        paused: provider.paused_until().is_some_and(|(until, _)| until > Instant::now()),
        lost: 0,
        ends: BTreeMap::new(),
        errors: BTreeMap::new(),
    };
    tally.change(|counts| {
        status.lost = counts.lost;
        status.ends.clone_from(&counts.ends);
        status.errors.clone_from(&counts.errors);
    });
    status
}
