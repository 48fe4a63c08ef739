//! The breaker of a dependency, shared over agents through the store of tokens. The clock is paused.

mod retry_token_support;

use futures_util::future::join_all;
use retry_token_support::*;
use std::{
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceBuilder};
use tower_herd::{
    Alert, Mode, RefusalKind, Switch,
    retry_token::{
        DeferredBy, JobBreakerLayer, JobBreakerSettings, LocalTokens, RetryTokenLayer, RetryTokens,
        TokenSettings, Tokens, WaitCause,
    },
};

type Layers = JobBreakerLayer<Remote, fn(&Job) -> Option<&'static str>>;

/// Agents, each a process of its own, over one store.
struct Fleet {
    store: Remote,
    handler: Handler,
    alerts: Arc<Mutex<Vec<Alert>>>,
    settings: JobBreakerSettings,
}

impl Fleet {
    fn new(settings: JobBreakerSettings) -> Self {
        Fleet { store: Remote::new(), handler: Handler::new(Does::Fail), alerts: Arc::default(), settings }
    }

    fn tokens(&self) -> Tokens<Remote> {
        Tokens::with("jobs", self.store.clone(), TokenSettings::new().min_wait(MS(1))).unwrap()
    }

    fn layer(&self) -> Layers {
        let alerts = self.alerts.clone();
        let dependency: fn(&Job) -> Option<&'static str> = |job| job.key.as_ref().map(|_| "crm");
        JobBreakerLayer::with(&self.tokens(), dependency, self.settings)
            .unwrap()
            .on_alert(move |alert| alerts.lock().unwrap().push(alert.clone()))
    }

    fn agent(
        &self,
    ) -> impl Service<Job, Response = (), Error = tower::BoxError, Future: Send> + Clone + use<> {
        self.layer().layer(self.handler.clone())
    }

    fn alerts(&self) -> Vec<Alert> {
        self.alerts.lock().unwrap().clone()
    }
}

fn exact() -> JobBreakerSettings {
    JobBreakerSettings::new().jitter(0.0)
}

fn job() -> Job {
    Job::new("any", 1)
}

/// Exactly consecutive failures of all agents open it; a success of any of them starts the count again.
#[tokio::test(start_paused = true)]
async fn it_opens_after_exactly_so_many_failures_in_a_row_of_all_agents() {
    for failures in [1, 2, 5, 50] {
        let fleet = Fleet::new(exact().failures(failures));
        let agents = [fleet.agent(), fleet.agent(), fleet.agent()];
        let mut turn = 0;
        let mut next = || {
            turn += 1;
            &agents[turn % 3]
        };
        if failures > 1 {
            for _ in 0..3 {
                for _ in 1..failures {
                    assert!(run(next(), job()).await.unwrap_err().is::<Failed>());
                }
                fleet.handler.set(Does::Succeed);
                run(next(), job()).await.unwrap();
                fleet.handler.set(Does::Fail);
            }
        }
        for n in 0..failures {
            assert!(run(next(), job()).await.unwrap_err().is::<Failed>(), "{n} of {failures}");
            assert_eq!(fleet.alerts().len(), usize::from(n + 1 == failures));
        }
        let runs = fleet.handler.runs();
        for _ in 0..9 {
            let result = run(next(), job()).await;
            let refusal = refusal(&result);
            assert_eq!((refusal.kind, refusal.scope.as_deref()), (RefusalKind::NotBefore, Some("crm")));
            let wait = refusal.not_before().unwrap();
            assert_eq!((wait.cause, wait.streak), (WaitCause::Breaker, failures));
            assert!(wait.wait > 599 * SECOND && wait.wait <= 600 * SECOND, "{wait:?}");
        }
        assert_eq!(fleet.handler.runs(), runs);
    }
}

#[tokio::test(start_paused = true)]
async fn a_crowd_that_fails_in_one_instant_opens_it_and_tells_once() {
    let fleet = Fleet::new(exact());
    let agents: Vec<_> = (0..12).map(|_| fleet.agent()).collect();
    join_all(agents.iter().map(|agent| run(agent, job()))).await;
    assert_eq!((fleet.handler.runs(), fleet.alerts().len()), (12, 1));
    for agent in &agents {
        assert!(refusal(&run(agent, job()).await).not_before().unwrap().wait > 599 * SECOND);
    }
    // Fewer than it takes are counted, each of them.
    let fleet = Fleet::new(exact());
    let agents: Vec<_> = (0..4).map(|_| fleet.agent()).collect();
    join_all(agents.iter().map(|agent| run(agent, job()))).await;
    assert_eq!(fleet.store.peek("breaker:crm").await.unwrap().unwrap().streak, 4);
    assert!(run(&agents[0], job()).await.unwrap_err().is::<Failed>());
    refusal(&run(&agents[1], job()).await);
}

#[tokio::test(start_paused = true)]
async fn the_alert_says_what_broke_and_is_kept_up_to_date() {
    let fleet = Fleet::new(exact());
    let layer = fleet.layer();
    let (handle, agent) = (layer.handle(), layer.layer(fleet.handler.clone()));
    for _ in 0..5 {
        sleep(2 * SECOND).await;
        try_run(&agent, job()).await;
    }
    let [alert] = &fleet.alerts()[..] else { panic!("one") };
    assert_eq!((&*alert.provider, alert.failures, alert.refused), ("crm", 5, 0));
    assert_eq!((alert.kind.as_str(), alert.open_for), ("broken", 600 * SECOND));
    assert!(alert.failing_for >= 8 * SECOND && alert.samples.len() == 4, "{alert:?}");
    for _ in 0..70 {
        refusal(&run(&agent, job()).await);
    }
    assert_eq!((handle.deferred("crm"), handle.incident("crm").unwrap().refused), (70, 70));
    assert_eq!(handle.incident("crm").unwrap().incident, alert.incident);
    assert_eq!((handle.deferred("other"), handle.incident("other")), (0, None));
    // It ends with a probe that succeeds.
    sleep(600 * SECOND).await;
    fleet.handler.set(Does::Succeed);
    run(&agent, job()).await.unwrap();
    assert_eq!((handle.deferred("crm"), handle.incident("crm")), (0, None));
}

#[tokio::test(start_paused = true)]
async fn one_probe_for_all_agents_and_who_is_refused_consumes_nothing() {
    let fleet = Fleet::new(exact());
    let agents: Vec<_> = (0..20).map(|_| fleet.agent()).collect();
    for _ in 0..5 {
        try_run(&agents[0], job()).await;
    }
    for probe in 1..=4 {
        // While it is open, nothing that comes prolongs it or is counted.
        let until = Instant::now() + 600 * SECOND;
        while Instant::now() < until {
            for agent in &agents[..3] {
                refusal(&run(agent, job()).await);
            }
            sleep(7 * SECOND).await;
        }
        let (runs, streak) =
            (fleet.handler.runs(), fleet.store.peek("breaker:crm").await.unwrap().unwrap().streak);
        fleet.handler.set(Does::Take(20 * SECOND, probe == 4));
        let results = join_all(agents.iter().map(|agent| run(agent, job()))).await;
        assert_eq!(fleet.handler.runs() - runs, 1, "probe {probe}");
        let refused = results.iter().filter_map(|result| result.as_ref().err()).filter(|e| !e.is::<Failed>());
        assert_eq!(refused.count(), 19);
        if probe < 4 {
            assert_eq!(fleet.store.peek("breaker:crm").await.unwrap().unwrap().streak, streak + 1);
        }
    }
    fleet.handler.set(Does::Succeed);
    for agent in &agents {
        run(agent, job()).await.unwrap();
    }
    assert_eq!(
        (fleet.alerts().len(), fleet.store.tokens.len()),
        (1, 0),
        "one incident, and nothing left of it"
    );
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_takes_long_stays_the_only_one_and_one_that_is_lost_is_given_up() {
    let fleet = Fleet::new(exact().probe_timeout(30 * SECOND));
    let agents = [fleet.agent(), fleet.agent()];
    for _ in 0..5 {
        try_run(&agents[0], job()).await;
    }
    sleep(600 * SECOND).await;
    fleet.handler.set(Does::Take(300 * SECOND, false));
    let probe = tokio::spawn({
        let agent = agents[0].clone();
        async move { run(&agent, job()).await }
    });
    sleep(SECOND).await;
    let runs = fleet.handler.runs();
    for _ in 0..29 {
        refusal(&run(&agents[1], job()).await);
        sleep(10 * SECOND).await;
    }
    assert_eq!(fleet.handler.runs(), runs);
    assert!(probe.await.unwrap().unwrap_err().is::<Failed>());
    sleep(600 * SECOND).await;
    // Dropped: no verdict. The next goes when its lease is over.
    assert!(timeout(SECOND, run(&agents[0], job())).await.is_err());
    refusal(&run(&agents[1], job()).await);
    sleep(30 * SECOND).await;
    fleet.handler.set(Does::Succeed);
    run(&agents[1], job()).await.unwrap();
    assert_eq!(fleet.alerts().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_began_before_it_opened_changes_nothing() {
    for good in [true, false] {
        let fleet = Fleet::new(exact());
        let agent = fleet.agent();
        // One that hangs for longer than it will be open, and one that does not.
        let start = |takes| {
            fleet.handler.set(Does::Take(takes, good));
            let agent = agent.clone();
            tokio::spawn(async move { run(&agent, job()).await })
        };
        let long = start(700 * SECOND);
        tokio::task::yield_now().await;
        sleep(SECOND).await;
        let short = start(60 * SECOND);
        sleep(SECOND).await;
        fleet.handler.set(Does::Fail);
        for _ in 0..5 {
            try_run(&agent, job()).await;
        }
        assert_eq!(short.await.unwrap().is_ok(), good);
        assert!(refusal(&run(&agent, job()).await).not_before().unwrap().wait > 500 * SECOND);
        assert_eq!(long.await.unwrap().is_ok(), good);
        // Half open since: still it takes a probe.
        assert_eq!(fleet.store.peek("breaker:crm").await.unwrap().unwrap().streak, 5);
        try_run(&agent, job()).await;
        assert!(refusal(&run(&agent, job()).await).not_before().unwrap().wait > 590 * SECOND);
        assert_eq!(fleet.alerts().len(), 1);
    }
}

/// A success says nothing of failures that came after it was begun.
#[tokio::test(start_paused = true)]
async fn a_success_clears_the_failures_that_it_knew_of() {
    let fleet = Fleet::new(exact());
    let agent = fleet.agent();
    fleet.handler.set(Does::Take(60 * SECOND, true));
    let old = tokio::spawn({
        let agent = agent.clone();
        async move { run(&agent, job()).await }
    });
    sleep(SECOND).await;
    fleet.handler.set(Does::Fail);
    for _ in 0..4 {
        try_run(&agent, job()).await;
    }
    old.await.unwrap().unwrap();
    try_run(&agent, job()).await;
    refusal(&run(&agent, job()).await);
}

// joshrotenberg/tower-resilience#381: an open breaker was hidden behind an inner service that was never ready.
// Here readiness is the inner service's alone, and an open breaker answers each call at once, with its instant.
#[tokio::test(start_paused = true)]
async fn tower_resilience_381_an_open_breaker_is_ready_and_answers() {
    let fleet = Fleet::new(exact());
    let mut agent = fleet.agent();
    for _ in 0..5 {
        try_run(&agent, job()).await;
    }
    for _ in 0..3 {
        assert!(matches!(agent.poll_ready(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(()))));
        let start = Instant::now();
        let result = agent.call(job()).await;
        assert!(refusal(&result).retry_at.unwrap() > Instant::now() && start.elapsed() < MS(10));
    }
    // Nobody need come for it to open: its time is the store's.
    sleep(600 * SECOND).await;
    fleet.handler.set(Does::Succeed);
    agent.call(job()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_job_of_no_dependency_passes_untouched_and_a_breaker_that_is_off_too() {
    let fleet = Fleet::new(exact());
    let switch = Switch::new(Mode::Observe);
    let agent = fleet.layer().switch(&switch).layer(fleet.handler.clone());
    for _ in 0..10 {
        assert!(run(&agent, Job { key: None, attempt: 1 }).await.unwrap_err().is::<Failed>());
    }
    assert_eq!(fleet.store.asked(), 0);
    // It opens as it would, and its alert is raised.
    for _ in 0..10 {
        assert!(run(&agent, job()).await.unwrap_err().is::<Failed>());
    }
    assert_eq!((switch.would_refuse(), fleet.alerts().len()), (5, 1));
    switch.set(Mode::Enforce);
    refusal(&run(&agent, job()).await);
    switch.set(Mode::Off);
    let asked = fleet.store.asked();
    assert!(run(&agent, job()).await.unwrap_err().is::<Failed>());
    assert_eq!(fleet.store.asked(), asked);
}

/// Without the store each process has a breaker of its own, which knows what was known.
#[tokio::test(start_paused = true)]
async fn without_its_store_it_is_one_of_the_process() {
    let fleet = Fleet::new(exact());
    let (agent, other) = (fleet.agent(), fleet.agent());
    for _ in 0..5 {
        try_run(&agent, job()).await;
    }
    refusal(&run(&agent, job()).await);
    fleet.store.set(Health::Down);
    let wait = *refusal(&run(&agent, job()).await).not_before().unwrap();
    assert!(wait.wait > 599 * SECOND, "{wait:?}");
    // This one has not asked since: it learns anew.
    for _ in 0..5 {
        assert!(run(&other, job()).await.unwrap_err().is::<Failed>());
    }
    refusal(&run(&other, job()).await);
    // One alert for each that found out alone.
    assert_eq!(fleet.alerts().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_open_time_is_spread() {
    let mut waits = Vec::new();
    for seed in 0..20 {
        let store = LocalTokens::new();
        let tokens = Tokens::with("jobs", store, TokenSettings::new().seed(seed)).unwrap();
        let dependency = |_: &Job| Some("crm");
        let agent = JobBreakerLayer::new(&tokens, dependency).layer(Handler::new(Does::Fail));
        for _ in 0..5 {
            try_run(&agent, job()).await;
        }
        waits.push(refusal(&run(&agent, job()).await).not_before().unwrap().wait);
    }
    assert!(waits.iter().all(|wait| (540 * SECOND..=660 * SECOND).contains(wait)), "{waits:?}");
    waits.sort_unstable();
    waits.dedup();
    assert!(waits.len() > 15 && waits[waits.len() - 1].abs_diff(waits[0]) > 60 * SECOND, "{waits:?}");
}

/// All of it: the token inside the breaker, one adapter for both.
#[tokio::test(start_paused = true)]
async fn with_tokens_inside_each_refusal_is_put_back_once_without_an_attempt() {
    let store = Remote::new();
    let tokens = Tokens::new("jobs", store.clone());
    let (handler, put_back) = (Handler::new(Does::Fail), PutBack::default());
    let dependency = |_: &Job| Some("crm");
    let breaker = JobBreakerLayer::with(&tokens, dependency, exact()).unwrap().defer(put_back.clone());
    let handle = breaker.handle();
    let agent = ServiceBuilder::new()
        .layer(breaker)
        .layer(RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).defer(put_back.clone()))
        .service(handler.clone());
    // Refused by its token: neither a failure of the dependency nor one of its successes.
    for name in ["a", "b", "c", "d"] {
        try_run(&agent, Job::new(name, 1)).await;
        assert_eq!(
            refusal(&run(&agent, Job::new(name, 2)).await).not_before().unwrap().cause,
            WaitCause::Token
        );
    }
    assert_eq!(store.peek("breaker:crm").await.unwrap().unwrap().streak, 4);
    try_run(&agent, Job::new("e", 1)).await;
    // Open: the jobs' own tokens are not claimed.
    let claims = store.claims();
    for name in ["a", "b", "new"] {
        assert_eq!(
            refusal(&run(&agent, Job::new(name, 2)).await).not_before().unwrap().cause,
            WaitCause::Breaker
        );
    }
    assert_eq!((store.claims(), handle.deferred("crm")), (claims, 3));
    let all = put_back.all();
    let count = |why| all.iter().filter(|deferral| deferral.why == why).count();
    assert_eq!(count(DeferredBy::Failure), 5);
    assert_eq!(count(DeferredBy::Refusal(WaitCause::Token)), 4);
    assert_eq!(count(DeferredBy::Refusal(WaitCause::Breaker)), 3);
    assert_eq!(handler.at_once.load(Relaxed), 0);
}

#[test]
fn settings_that_cannot_be_meant_name_their_field() {
    let tokens = Tokens::new("jobs", LocalTokens::new());
    let new = JobBreakerSettings::new;
    for (settings, field) in [
        (new().failures(0), "failures"),
        (new().open(Duration::ZERO), "open"),
        (new().open(Duration::MAX), "open"),
        (new().jitter(1.0), "jitter"),
        (new().jitter(f64::NAN), "jitter"),
        (new().probe_timeout(Duration::ZERO), "probe_timeout"),
    ] {
        let layer = JobBreakerLayer::with(&tokens, |_: &Job| Some("crm"), settings);
        assert_eq!(layer.err().unwrap().field, field);
    }
}

#[cfg(feature = "serde")]
#[test]
fn settings_are_loaded() {
    let breaker: JobBreakerSettings = serde_json::from_str(r#"{ "failures": 3, "open": "1m" }"#).unwrap();
    assert_eq!(breaker, JobBreakerSettings::new().failures(3).open(60 * SECOND));
    let tokens: TokenSettings =
        serde_json::from_str(r#"{ "timeout": "1s", "on_outage": "closed" }"#).unwrap();
    let closed = tower_herd::retry_token::OnOutage::Closed;
    assert_eq!(tokens, TokenSettings::new().timeout(SECOND).on_outage(closed));
    assert!(serde_json::from_str::<TokenSettings>(r#"{ "timeouts": "1s" }"#).is_err());
}

/// Between the look at the token and the claim of the probe, somebody else's probe has closed it.
#[tokio::test(start_paused = true)]
async fn who_comes_too_late_to_probe_is_an_ordinary_run() {
    let fleet = Fleet::new(exact());
    let agent = fleet.agent();
    for _ in 0..5 {
        try_run(&agent, job()).await;
    }
    sleep(600 * SECOND).await;
    let late = tokio::spawn({
        let agent = agent.clone();
        async move { run(&agent, job()).await }
    });
    // It looks until 2 ms have passed, and claims until 4.
    sleep(MS(3)).await;
    let token = fleet.store.tokens.peek("breaker:crm").await.unwrap().unwrap();
    assert!(fleet.store.tokens.clear("breaker:crm", token.holder).await.unwrap());
    assert!(late.await.unwrap().unwrap_err().is::<Failed>());
    // Its failure is the first of a new row, and not that of a probe.
    let token = fleet.store.peek("breaker:crm").await.unwrap().unwrap();
    assert!(token.streak == 1 && token.wait < MS(10), "{token:?}");
    for streak in 2..=5 {
        assert!(run(&agent, job()).await.unwrap_err().is::<Failed>());
        assert_eq!(fleet.store.peek("breaker:crm").await.unwrap().unwrap().streak, streak);
    }
    refusal(&run(&agent, job()).await);
    assert_eq!(fleet.alerts().len(), 2, "another incident");
}

/// What a process takes into an outage of the store is what it last saw, and not what it saw once.
#[tokio::test(start_paused = true)]
async fn a_breaker_that_has_closed_is_not_open_without_the_store() {
    let fleet = Fleet::new(exact());
    let (agent, other) = (fleet.agent(), fleet.agent());
    for _ in 0..5 {
        try_run(&agent, job()).await;
    }
    refusal(&run(&other, job()).await);
    // An operator closes it.
    let token = fleet.store.tokens.peek("breaker:crm").await.unwrap().unwrap();
    assert!(fleet.store.tokens.clear("breaker:crm", token.holder).await.unwrap());
    fleet.handler.set(Does::Succeed);
    run(&other, job()).await.unwrap();
    fleet.store.set(Health::Down);
    run(&other, job()).await.unwrap();
    assert_eq!(fleet.alerts().len(), 1);
}
