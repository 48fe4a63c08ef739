//! One member of the fleet: agents that call the provider through a stack, under the ceiling of all.

use std::{
    future::Future,
    io::{BufRead as _, Write as _},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::{Deserialize, Serialize};
use tokio::{sync::oneshot, task::JoinSet, time::sleep};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    ClassifyLayer, Fleet, FleetLimitLayer, Provider, ProviderSettings, RetryAfterLayer, TaskLayer,
    store::{FleetSettings, LeaseState, MemoryStore, Outage},
};
use tower_herd_redis::{RedisConfig, RedisStore};

use crate::provider::WORKER;

/// A lease lasts so long. This, and the times below, are two fifths of the defaults, so that there is something to
/// see in half a minute.
pub const TTL: Duration = Duration::from_secs(4);
const RENEW: Duration = Duration::from_millis(400);
const GAP: Duration = Duration::from_millis(1200);
const ANSWER: Duration = Duration::from_millis(300);

/// How often a member tells how it stands.
const TELL: Duration = Duration::from_millis(100);

/// What a member is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    pub number: usize,
    /// Where the provider is,
    pub url: String,
    /// how it is called in the store,
    pub name: String,
    /// and what it holds at a time.
    pub ceiling: u32,
    /// The most calls that this member wants to make at a time.
    pub agents: u32,
    pub seed: u64,
    /// Where the store is; none: in this process.
    pub redis: Option<String>,
}

/// How a member stands.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Held by its lease.
    pub slots: u32,
    pub in_flight: u32,
    pub waiting: usize,
    /// In force for all, as the member knows it.
    pub ceiling: u32,
    /// How it stands with the store, in a word; empty: well.
    pub lease: String,
    pub done: u64,
    pub failed: u64,
    /// Calls to the store,
    pub exchanges: u64,
    /// and how many got no answer.
    pub errors: u64,
}

/// The fleet as this member sees it: its store is Redis, or in memory.
fn join(orders: &Orders, memory: Option<MemoryStore>) -> Result<(Fleet, Provider), BoxError> {
    // `Stop`, so that all slots of a killed process come back: the default keeps a few of them aside, in case
    // only the way of the process to the store is broken.
    let settings = FleetSettings::new()
        .label(format!("worker {}", orders.number + 1))
        .ttl(TTL)
        .renew(RENEW)
        .gap(GAP)
        .answer_within(ANSWER)
        .outage(Outage::Stop);
    let fleet = match (&orders.redis, memory) {
        (Some(url), _) => {
            let config = RedisConfig::single(url)?.response_timeout(ANSWER);
            Fleet::shared(RedisStore::new(config)?, settings)?
        }
        (None, Some(store)) => Fleet::shared(store, settings)?,
        (None, None) => return Err("no store to meet at".into()),
    };
    let fleet = fleet.seed(orders.seed);
    let provider = fleet.configure(&orders.name, ProviderSettings::new().ceiling(orders.ceiling))?;
    Ok((fleet, provider))
}

/// Works until `over`, and tells how it stands. Then it leaves the fleet, and its slots are free at once.
pub async fn work(
    orders: Orders,
    memory: Option<MemoryStore>,
    tell: impl Fn(Status),
    over: impl Future<Output = ()>,
) -> Result<(), BoxError> {
    let (fleet, provider) = join(&orders, memory)?;
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(60)))
        .layer(RetryAfterLayer::new(&provider))
        .layer(FleetLimitLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .service(Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>());
    let work = Arc::new(Work::default());
    let mut agents = JoinSet::new();
    for agent in 0..orders.agents {
        let (service, orders, work) = (service.clone(), orders.clone(), work.clone());
        agents.spawn(async move {
            loop {
                if agent >= work.wanted.load(Relaxed) {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
                match call(service.clone(), &orders).await {
                    Ok(()) => drop(work.done.fetch_add(1, Relaxed)),
                    Err(_) => {
                        work.failed.fetch_add(1, Relaxed);
                        sleep(Duration::from_millis(50)).await;
                    }
                }
            }
        });
    }
    let mut random = fastrand::Rng::with_seed(orders.seed);
    let want = async {
        loop {
            // Now this process has much to do, now that.
            work.wanted.store(random.u32(1..=orders.agents), Relaxed);
            sleep(Duration::from_millis(random.u64(1500..4000))).await;
        }
    };
    let telling = async {
        loop {
            tell(work.status(&provider));
            sleep(TELL).await;
        }
    };
    tokio::select! {
        biased;
        () = over => {}
        () = want => {}
        () = telling => {}
    }
    agents.shutdown().await;
    fleet.leave().await;
    tell(work.status(&provider));
    Ok(())
}

/// What there is to do, and what was done.
#[derive(Default)]
struct Work {
    wanted: AtomicU32,
    done: AtomicU64,
    failed: AtomicU64,
}

impl Work {
    fn status(&self, provider: &Provider) -> Status {
        let Some(lease) = provider.lease() else { return Status::default() };
        let word = match lease.state {
            LeaseState::Held => "",
            LeaseState::Joining => "joins",
            LeaseState::Learning => "the store learns",
            LeaseState::Lost => "has no lease",
            _ => "?",
        };
        Status {
            slots: lease.slots,
            in_flight: provider.in_flight(),
            waiting: provider.waiting(),
            ceiling: lease.ceiling,
            lease: word.to_owned(),
            done: self.done.load(Relaxed),
            failed: self.failed.load(Relaxed),
            exchanges: lease.exchanges,
            errors: lease.errors,
        }
    }
}

/// One call, read to its end: only then is its slot free.
async fn call<S, B>(service: S, orders: &Orders) -> Result<(), BoxError>
where
    S: Service<Request<Full<Bytes>>, Response = http::Response<B>, Error = BoxError>,
    B: http_body::Body<Error: Into<BoxError>>,
{
    let mut request = Request::post(&orders.url).body(Full::from("{}"))?;
    request.headers_mut().insert(WORKER, HeaderValue::from(orders.number));
    let reply = service.oneshot(request).await?;
    let status = reply.status();
    reply.into_body().collect().await.map_err(Into::into)?;
    if status.is_success() { Ok(()) } else { Err(format!("answered {status}").into()) }
}

/// The main of a process that is a member. Its orders are the first line of its input; it ends when that does, so
/// also when whoever started it is gone.
pub fn child() -> ExitCode {
    let mut line = String::new();
    let orders =
        std::io::stdin().lock().read_line(&mut line).ok().and_then(|_| serde_json::from_str(&line).ok());
    let Some(orders) = orders else {
        eprintln!("error: --worker is for the example itself, which gives its workers their orders");
        return ExitCode::from(2);
    };
    let (end, over) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().take_while(Result::is_ok).for_each(drop);
        drop(end);
    });
    let tell = |status: Status| {
        let text = serde_json::to_string(&status).unwrap_or_default();
        // If nobody reads it any more, the input has ended too.
        writeln!(std::io::stdout().lock(), "{text}").ok();
    };
    let run = work(orders, None, tell, async { drop(over.await) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
