//! One retry budget for layers of ours and for retry code that is not.
//!
//! ```text
//! cargo run --example foreign_retry
//! ```
//!
//! Two clients call the same provider, which is dead. One repeats its calls with `JitteredRetryLayer`, the
//! other with tower's own `RetryLayer` and the policy below. Both draw on one `RatioBudget`, so what the
//! provider sees is ten percent more than the calls that were made, and a handful, and not four times as
//! much. Time is virtual: it ends at once.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};
use tower::{BoxError, Layer, ServiceExt, retry::Policy};
use tower_herd::{Budget, JitteredRetryLayer, RatioBudget, Task, TaskLayer, random::Seeds};

const ATTEMPTS: u32 = 4;
const BASE: Duration = Duration::from_millis(200);

/// Foreign retry code that keeps the four rules of a budget. tower clones the policy for each request, so
/// what it counts is of one request.
#[derive(Clone)]
struct Shared {
    budget: RatioBudget,
    seeds: Arc<Seeds>,
    repeated: u32,
}

/// What was taken out, until the repetition is sent.
struct Withdrawn(Option<RatioBudget>);

impl Withdrawn {
    fn sent(mut self) {
        self.0 = None;
    }
}

impl Drop for Withdrawn {
    fn drop(&mut self) {
        // Rule 3: the caller gave up while it waited, and nothing was sent.
        if let Some(budget) = self.0.take() {
            budget.refund();
        }
    }
}

impl<Req: Clone, Res, E> Policy<Req, Res, E> for Shared {
    type Future = Pin<Box<dyn Future<Output = ()> + Send>>;

    fn retry(&mut self, _: &mut Req, result: &mut Result<Res, E>) -> Option<Self::Future> {
        // Rule 4 is for budgets that listen; this one does not.
        if result.is_ok() || self.repeated + 1 >= ATTEMPTS {
            return None;
        }
        // Rule 2: asked before the wait. Without it the caller gets the error at hand, now.
        if !self.budget.try_withdraw() {
            return None;
        }
        let withdrawn = Withdrawn(Some(self.budget.clone()));
        let wait = self.seeds.session().up_to(BASE * 2_u32.pow(self.repeated));
        self.repeated += 1;
        Some(Box::pin(async move {
            tokio::time::sleep(wait).await;
            withdrawn.sent();
        }))
    }

    fn clone_request(&mut self, request: &Req) -> Option<Req> {
        // Rule 1: tower asks for a copy before each call; the first one is the original request.
        if self.repeated == 0 {
            self.budget.deposit();
        }
        Some(request.clone())
    }
}

/// Calls that were made, and calls that the provider saw.
#[derive(Debug)]
struct Load {
    calls: u32,
    seen: u32,
}

async fn run(calls: u32) -> Result<Load, BoxError> {
    let seen = Arc::new(AtomicU32::new(0));
    let counted = seen.clone();
    let dead = tower::service_fn(move |_: http::Request<String>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {
            Err::<http::Response<String>, _>(std::io::Error::from(std::io::ErrorKind::ConnectionRefused))
        }
    });

    let budget = RatioBudget::default();
    let ours = JitteredRetryLayer::new().attempts(ATTEMPTS).base(BASE).budget(budget.clone());
    let ours = TaskLayer::new().layer(ours.layer(dead.clone()));
    let foreign = Shared { budget: budget.clone(), seeds: Arc::new(Seeds::from_entropy()), repeated: 0 };
    let foreign = tower::retry::RetryLayer::new(foreign).layer(dead);

    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..calls {
        let mut request = http::Request::new(String::new());
        if n % 2 == 0 {
            request.extensions_mut().insert(Task::new(u64::from(n)).allowance(ATTEMPTS));
            let client = ours.clone();
            tasks.spawn(async move { client.oneshot(request).await.is_ok() });
        } else {
            let client = foreign.clone();
            tasks.spawn(async move { client.oneshot(request).await.is_ok() });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    while let Some(done) = tasks.join_next().await {
        assert!(!done?, "the provider is dead");
    }
    Ok(Load { calls, seen: seen.load(Ordering::Relaxed) })
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), BoxError> {
    let Load { calls, seen } = run(2000).await?;
    println!("{calls} calls by two clients, up to {ATTEMPTS} attempts each: a dead provider saw {seen}");
    println!("without a budget it would have seen {}", calls * ATTEMPTS);
    // Ten percent, the burst of 3, and one more for each ten seconds.
    assert!(seen <= calls + calls / 10 + 3 + 3, "{seen}");
    assert!(seen >= calls + calls / 10, "{seen}");
    Ok(())
}
