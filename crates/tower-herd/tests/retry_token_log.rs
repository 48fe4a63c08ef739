//! What retry tokens log, and what not. A binary of its own, since whether a place logs is remembered by the process.

mod retry_token_support;

use futures_util::future::join_all;
use retry_token_support::*;
use std::sync::{Arc, Mutex};
use tower::Layer;
use tower_herd::retry_token::{
    JobBreakerLayer, LocalTokens, OnOutage, RetryTokenLayer, TokenSettings, Tokens,
};
use tracing::{
    Level,
    field::{Field, Visit},
};
use tracing_subscriber::{layer::SubscriberExt, registry};

/// Level and fields of each event.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<(Level, String)>>>);

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Seen {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        self.0.lock().unwrap().push((*event.metadata().level(), fields.0));
    }
}

impl Seen {
    /// Events of this level or worse with this text.
    fn count(&self, level: Level, text: &str) -> usize {
        let seen = self.0.lock().unwrap();
        seen.iter().filter(|(of, event)| *of <= level && event.contains(text)).count()
    }
}

/// One test, since there is one subscriber of a process.
#[tokio::test(start_paused = true)]
async fn each_trouble_is_told_once_and_a_refusal_is_none() {
    let seen = Seen::default();
    tracing::subscriber::set_global_default(registry().with(seen.clone())).unwrap();

    // Refusals are no trouble.
    let tokens = Tokens::new("quiet", Remote::new());
    let service =
        RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(Handler::new(Does::Fail));
    try_run(&service, Job::new("a", 1)).await;
    join_all((0..100).map(|_| try_run(&service, Job::new("a", 2)))).await;
    assert_eq!((seen.count(Level::INFO, ""), seen.count(Level::DEBUG, "refused")), (0, 100));

    // Retries that come to tokens in memory which do not know them: several processes, or a restart.
    let tokens = Tokens::new("memory", LocalTokens::new());
    let service = RetryTokenLayer::new(&tokens, key, attempt).layer(Handler::new(Does::Fail));
    try_run(&service, Job::new("first", 1)).await;
    assert_eq!(seen.count(Level::WARN, "does not know"), 0);
    for n in 0..10 {
        try_run(&service, Job::new(&n.to_string(), 2)).await;
    }
    assert_eq!(
        (seen.count(Level::WARN, "does not know"), seen.count(Level::WARN, "store=\"memory\"")),
        (1, 1)
    );

    // A store that is lost: one alert an outage, which names the policy. To run open is one of these.
    for policy in [OnOutage::Local, OnOutage::Open, OnOutage::Closed] {
        let settings = TokenSettings::new().on_outage(policy);
        let tokens = Tokens::with(policy.as_str(), Remote::new(), settings).unwrap();
        let service = RetryTokenLayer::new(&tokens, key, attempt).layer(Handler::new(Does::Fail));
        tokens.store().set(Health::Down);
        for n in 0..200 {
            try_run(&service, Job::new(&n.to_string(), 2)).await;
            tokio::time::sleep(SECOND).await;
        }
        let alert = format!(
            "kind=\"store_down\" store=\"{0}\" error=\"connection refused\" policy=\"{0}\"",
            policy.as_str()
        );
        assert_eq!(seen.count(Level::WARN, &alert), 1, "{:?}", seen.0.lock().unwrap());
    }

    // A breaker tells of its opening, once, and at its end of the jobs that it has deferred.
    let tokens = Tokens::new("crm jobs", Remote::new());
    let handler = Handler::new(Does::Fail);
    let service = JobBreakerLayer::new(&tokens, |_: &Job| Some("crm")).layer(handler.clone());
    for _ in 0..25 {
        try_run(&service, Job::new("a", 1)).await;
    }
    assert_eq!(seen.count(Level::WARN, "kind=\"broken\" provider=\"crm\""), 1);
    tokio::time::sleep(700 * SECOND).await;
    handler.set(Does::Succeed);
    run(&service, Job::new("a", 1)).await.unwrap();
    assert_eq!(seen.count(Level::INFO, "dependency=\"crm\" deferred=20"), 1);

    // A lease that is lost while its run goes on.
    let tokens = Tokens::with("leases", Remote::new(), TokenSettings::new().asks(MS(1), MS(1))).unwrap();
    let schedule = plain().hold(Some(3 * SECOND)).unwrap();
    let handler = Handler::new(Does::Take(30 * SECOND, true));
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(schedule).layer(handler);
    let job = tokio::spawn({
        let service = service.clone();
        async move { run(&service, Job::new("a", 1)).await }
    });
    tokio::time::sleep(MS(500)).await;
    tokens.store().set(Health::Down);
    tokio::time::sleep(5 * SECOND).await;
    tokens.store().set(Health::Well);
    tokio::time::sleep(MS(100)).await;
    let second = tokio::spawn(async move { run(&service, Job::new("a", 2)).await });
    job.await.unwrap().unwrap();
    assert_eq!(seen.count(Level::WARN, "the lease of a job that still runs was lost"), 1);
    second.await.unwrap().unwrap();
}
