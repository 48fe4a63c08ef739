//! Several processes under one ceiling: each a fleet of its own, all on one store, under a paused clock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_herd::{
    ClassifyLayer, Fleet, FleetLimitLayer, Provider, ProviderSettings, RetryAfterLayer, TaskLayer,
    store::{FleetSettings, LeaseState, MemoryStore},
};

type Request = http::Request<String>;
type Response = http::Response<String>;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// A provider that counts what is in flight.
#[derive(Clone, Default)]
struct Counter(Arc<Counts>);

#[derive(Default)]
struct Counts {
    now: AtomicU32,
    most: AtomicU32,
    calls: AtomicU32,
}

struct Flight(Counter);

impl Counter {
    fn begin(&self) -> Flight {
        let now = self.0.now.fetch_add(1, SeqCst) + 1;
        self.0.most.fetch_max(now, SeqCst);
        self.0.calls.fetch_add(1, SeqCst);
        Flight(self.clone())
    }
    fn most(&self) -> u32 {
        self.0.most.load(SeqCst)
    }
    fn calls(&self) -> u32 {
        self.0.calls.load(SeqCst)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.0.now.fetch_sub(1, SeqCst);
    }
}

fn process(store: &MemoryStore, seed: u64, settings: FleetSettings) -> Fleet {
    Fleet::shared(store.clone(), settings.on_this_runtime()).expect("valid settings").seed(seed)
}

fn stack(
    provider: &Provider,
    counter: &Counter,
    latency: Duration,
) -> impl Service<Request, Response: Send, Error = tower_herd::BoxError, Future: Send> + Clone + Send + use<>
{
    let counter = counter.clone();
    ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(600)))
        .layer(RetryAfterLayer::new(provider))
        .layer(FleetLimitLayer::new(provider))
        .layer(ClassifyLayer::new(provider))
        .service(service_fn(move |_: Request| {
            let flight = counter.begin();
            async move {
                sleep(latency).await;
                drop(flight);
                Ok::<_, std::io::Error>(Response::new(String::new()))
            }
        }))
}

async fn calls(provider: Provider, counter: Counter, latency: Duration, many: usize) -> u32 {
    let service = stack(&provider, &counter, latency);
    let mut done = 0;
    for _ in 0..many {
        done += u32::from(service.clone().oneshot(Request::default()).await.is_ok());
    }
    done
}

#[tokio::test(start_paused = true)]
async fn processes_share_one_ceiling() {
    let store = MemoryStore::new();
    let counter = Counter::default();
    let begin = Instant::now();
    let mut tasks = Vec::new();
    let mut providers = Vec::new();
    for seed in 0..4 {
        let fleet = process(&store, seed, FleetSettings::new());
        let provider = fleet.configure("search", ProviderSettings::new().ceiling(6)).expect("valid");
        for _ in 0..5 {
            tasks.push(tokio::spawn(calls(provider.clone(), counter.clone(), MS(1000), 15)));
        }
        providers.push(provider);
    }
    let mut done = 0;
    for task in tasks {
        done += task.await.expect("no panic");
    }
    let took = begin.elapsed();
    assert_eq!(done, 300);
    assert!(counter.most() <= 6, "{} in flight", counter.most());
    // 300 calls of a second on 6 slots: 50 s.
    let lease = providers[0].lease().expect("in a fleet");
    assert!(took < Duration::from_secs(56), "{took:?}, {lease:?}");
    assert_eq!((lease.state, lease.members, lease.ceiling), (LeaseState::Held, 4, 6));
    let exchanges: u64 =
        providers.iter().map(|provider| provider.lease().expect("in a fleet").exchanges).sum();
    let rate = exchanges as f64 / 4.0 / took.as_secs_f64();
    eprintln!("{took:?}, {rate:.2} exchanges a second and process");
    assert!(rate <= 2.0, "{rate}");
}
