//! Retry tokens over time: who runs when, what grows, and what is left behind. The clock is paused.

mod retry_token_support;

use futures_util::future::join_all;
use retry_token_support::*;
use std::{
    error::Error,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, advance, sleep, timeout};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    Mode, RefusalKind, Switch,
    observe::{Event, Observe},
    retry_token::{
        Claim, Defer, Deferral, DeferredBy, LocalTokens, OnOutage, Outcome, RetryTokenLayer, RetryTokens,
        Schedule, TokenSettings, Tokens, Wait, WaitCause,
    },
};

type Result<A> = std::result::Result<A, tower::BoxError>;

/// Both stores: the one of this process, which is asked without a box, and one that is awaited.
macro_rules! on_both {
    ($test:ident) => {
        $test(Tokens::new("jobs", LocalTokens::new())).await;
        $test(Tokens::new("jobs", Remote::new())).await;
    };
}

#[tokio::test(start_paused = true)]
async fn a_job_that_failed_is_not_run_early_by_anyone() {
    on_both!(not_early);
}

async fn not_early<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Fail);
    let layer = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain());
    // Three workers, each with a service of its own.
    let workers: Vec<_> = (0..3).map(|_| layer.layer(handler.clone())).collect();
    let start = Instant::now();
    let mut attempt = 1;
    let mut refusals = 0;
    while start.elapsed() < 32 * SECOND {
        for worker in &workers {
            let result = run(worker, Job::new("invoice", attempt)).await;
            match result.as_ref().unwrap_err().is::<Failed>() {
                true => attempt += 1,
                false => {
                    refusals += 1;
                    let refusal = refusal(&result);
                    assert_eq!((refusal.kind, &*refusal.provider), (RefusalKind::NotBefore, "jobs"));
                    assert_eq!(refusal.scope.as_deref(), Some("invoice"));
                    let wait = refusal.not_before().unwrap();
                    assert_eq!((wait.cause, wait.streak), (WaitCause::Token, attempt - 1));
                    assert!(wait.wait > Duration::ZERO && refusal.wait().unwrap() >= wait.wait, "{wait:?}");
                }
            }
        }
        sleep(MS(50)).await;
    }
    let gaps = handler.gaps();
    assert_eq!(gaps.len(), 5, "{gaps:?}");
    for (gap, wait) in gaps.iter().zip([1, 2, 4, 8, 16]) {
        assert!(*gap >= wait * SECOND && *gap < wait * SECOND + MS(200), "{gaps:?}");
    }
    assert_eq!((tokens.counts().granted, tokens.counts().deferred), (6, refusals));
}

#[tokio::test(start_paused = true)]
async fn a_success_forgets_the_key() {
    on_both!(forgets);
}

async fn forgets<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Fail);
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    run(&service, Job::new("a", 1)).await.unwrap_err();
    sleep(SECOND).await;
    handler.set(Does::Succeed);
    run(&service, Job::new("a", 2)).await.unwrap();
    assert_eq!(tokens.store().peek("a").await.unwrap(), None);
    // At once: nothing is left of it.
    run(&service, Job::new("a", 1)).await.unwrap();
    run(&service, Job::new("b", 1)).await.unwrap();
    assert_eq!((handler.runs(), tokens.counts().running), (4, 0));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_left_of_a_hundred_thousand_jobs_that_succeed() {
    let store = LocalTokens::new();
    let tokens = Tokens::new("jobs", store.clone());
    let mut service = RetryTokenLayer::new(&tokens, key, attempt).layer(AtOnce);
    for n in 0..100_000 {
        service.ready().await.unwrap().call(Job::new(&n.to_string(), 1)).await.unwrap();
    }
    assert_eq!((store.len(), tokens.counts().granted), (0, 100_000));
}

#[tokio::test(start_paused = true)]
async fn a_key_of_none_passes_untouched() {
    on_both!(passes);
}

async fn passes<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Fail);
    let service = RetryTokenLayer::new(&tokens, key, attempt).layer(handler.clone());
    for attempt in 1..=10 {
        assert!(run(&service, Job { key: None, attempt }).await.unwrap_err().is::<Failed>());
    }
    assert_eq!((handler.runs(), tokens.counts().granted), (10, 0));
}

#[tokio::test(start_paused = true)]
async fn a_job_is_granted_on_the_first_attempt_too_and_one_of_three_triggers_runs() {
    let tokens = Tokens::new("jobs", Remote::new());
    let handler = Handler::new(Does::Take(SECOND, false));
    let layer = RetryTokenLayer::new(&tokens, key, attempt);
    let workers: Vec<_> = (0..3).map(|_| layer.layer(handler.clone())).collect();
    let results = join_all(workers.iter().map(|worker| run(worker, Job::new("nightly", 1)))).await;
    assert_eq!(
        (handler.runs(), results.iter().filter(|r| r.as_ref().unwrap_err().is::<Failed>()).count()),
        (1, 1)
    );
}

// ------------------------------------------------------------------------------------- crashes and drops

// oluciano/NexJob#143: the requeue of orphans ignored attempts, and a poison job looped.
#[tokio::test(start_paused = true)]
async fn nexjob_143_a_job_that_kills_its_worker_waits_longer_each_time() {
    on_both!(poison);
}

async fn poison<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Take(SECOND / 2, true));
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    let job = || Job::new("poison", 1);
    for streak in 1..=10_u32 {
        // The worker dies in the middle of it.
        assert!(timeout(MS(100), run(&service, job())).await.is_err());
        let token = tokens.store().peek("poison").await.unwrap().unwrap();
        assert_eq!(token.streak, streak);
        // A reaper hands it out at once.
        let wait = *refusal(&run(&service, job()).await).not_before().unwrap();
        assert_eq!((wait.streak, wait.cause), (streak, WaitCause::Token));
        sleep(wait.wait).await;
    }
    let waits = [1, 2, 4, 8, 16, 32, 60, 60, 60];
    for (gap, wait) in handler.gaps().iter().zip(waits) {
        assert!(*gap >= wait * SECOND && *gap < wait * SECOND + MS(200), "{:?}", handler.gaps());
    }
    assert_eq!((tokens.counts().dropped, tokens.counts().running), (10, 0));
}

// Wherever a run breaks off, the key stays closed for its wait.
#[tokio::test(start_paused = true)]
async fn a_token_is_kept_wherever_a_run_breaks_off() {
    on_both!(kept);
}

async fn kept<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Take(SECOND / 4, true));
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    // Before the first poll nothing was asked of a store that is awaited; one of this process has been asked.
    drop(ServiceExt::<Job>::ready(&mut service.clone()).await.unwrap().call(Job::new("unpolled", 1)));
    // While it is claimed, after it, and while it runs.
    for (n, after) in [MS(0), MS(1), MS(2), MS(100), MS(249)].into_iter().enumerate() {
        let name = format!("job {n}");
        let start = Instant::now();
        assert!(timeout(after, run(&service, Job::new(&name, 1))).await.is_err(), "{after:?}");
        let runs = handler.runs();
        // Whoever comes within the wait is refused, if the claim had been made.
        let early = run(&service, Job::new(&name, 2)).await;
        if tokens.store().local().is_some() || after > MS(2) {
            assert_eq!(refusal(&early).kind, RefusalKind::NotBefore, "{after:?}");
            assert_eq!(handler.runs(), runs);
            sleep(SECOND.saturating_sub(start.elapsed())).await;
            run(&service, Job::new(&name, 2)).await.unwrap();
        }
    }
    // A panic is no success.
    handler.set(Does::Panic);
    let panics = tokio::spawn({
        let service = service.clone();
        async move { run(&service, Job::new("panics", 1)).await }
    });
    assert!(panics.await.unwrap_err().is_panic());
    handler.set(Does::Succeed);
    assert_eq!(refusal(&run(&service, Job::new("panics", 2)).await).kind, RefusalKind::NotBefore);
    sleep(SECOND).await;
    run(&service, Job::new("panics", 2)).await.unwrap();
    assert_eq!(tokens.counts().running, 0);
}

#[tokio::test(start_paused = true)]
async fn between_the_end_of_a_run_and_its_clearing_a_crash_costs_one_wait() {
    let tokens = Tokens::new("jobs", Remote::new());
    let handler = Handler::new(Does::Succeed);
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    // The claim takes 2 ms, the run nothing, the clearing another 2.
    assert!(timeout(MS(3), run(&service, Job::new("a", 1))).await.is_err());
    assert_eq!(handler.runs(), 1);
    assert_eq!(refusal(&run(&service, Job::new("a", 1)).await).not_before().unwrap().streak, 1);
    sleep(SECOND).await;
    run(&service, Job::new("a", 2)).await.unwrap();
    assert_eq!(tokens.store().tokens.len(), 0);
    // After the clearing, before the queue knows: the job runs again, as without the layer.
    run(&service, Job::new("a", 2)).await.unwrap();
}

// --------------------------------------------------------------------------------------- fences and leases

// graphile/worker#169: a job of four hours was handed out again, and ran twice.
#[tokio::test(start_paused = true)]
async fn graphile_worker_169_a_run_longer_than_its_wait_is_held_if_asked() {
    on_both!(held);
}

async fn held<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Take(30 * SECOND, true));
    for (name, lease, runs) in [("held", Some(3 * SECOND), 1), ("not held", None, 5)] {
        let schedule = plain().hold(lease).unwrap();
        let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(schedule).layer(handler.clone());
        handler.runs.lock().unwrap().clear();
        let comers = (0..29).map(|n| {
            let service = service.clone();
            async move {
                sleep(n * SECOND).await;
                run(&service, Job::new(name, n + 1)).await
            }
        });
        let results = join_all(comers).await;
        // Without: after 1, 2, 4 and 8 s, beside each other.
        assert_eq!(handler.runs(), runs, "{name}");
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), runs, "{name}");
        // The success of the newest cleared it; that of a stale one cannot.
        if lease.is_some() {
            assert_eq!(tokens.store().peek(name).await.unwrap(), None);
        }
        sleep(100 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_with_its_run_at_the_latest_one_lease_later() {
    let tokens = Tokens::new("jobs", Remote::new());
    let put_back = PutBack::default();
    let handler = Handler::new(Does::Take(20 * SECOND, false));
    let schedule = plain().hold(Some(6 * SECOND)).unwrap();
    let service = RetryTokenLayer::new(&tokens, key, attempt)
        .schedule(schedule)
        .defer(put_back.clone())
        .layer(handler.clone());
    run(&service, Job::new("fails", 1)).await.unwrap_err();
    let [failure] = put_back.all()[..] else { panic!("put back once") };
    assert!(failure.wait > 3 * SECOND && failure.wait <= 6 * SECOND, "{failure:?}");
    // One that is dropped beats no more.
    assert!(timeout(10 * SECOND, run(&service, Job::new("dropped", 1))).await.is_err());
    let extends = tokens.store().extends();
    sleep(6 * SECOND).await;
    assert_eq!(tokens.store().extends(), extends);
    assert_eq!(tokens.store().peek("dropped").await.unwrap().unwrap().wait, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_that_is_lost_once_is_made_up_for() {
    let tokens = Tokens::with("jobs", Remote::new(), TokenSettings::new().asks(MS(1), MS(1))).unwrap();
    let handler = Handler::new(Does::Take(60 * SECOND, true));
    let schedule = plain().hold(Some(9 * SECOND)).unwrap();
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(schedule).layer(handler.clone());
    let job = tokio::spawn({
        let service = service.clone();
        async move { run(&service, Job::new("a", 1)).await }
    });
    sleep(SECOND).await;
    tokens.store().set(Health::Down);
    sleep(3 * SECOND).await;
    tokens.store().set(Health::Well);
    for _ in 0..50 {
        sleep(SECOND).await;
        refusal(&run(&service, Job::new("a", 2)).await);
    }
    job.await.unwrap().unwrap();
    assert_eq!(handler.runs(), 1);
}

// -------------------------------------------------------------------------------- refusals, failures, hints

// oban-bg/oban#245, oban-bg/oban#476: snoozes counted as attempts, and the next retry was days away.
// riverqueue/river#720, PR #730: a snooze raised what the queue counts.
// taskforcesh/bullmq#3000: delaying raised a counter that users branch on.
#[tokio::test(start_paused = true)]
async fn oban_245_476_river_720_a_thousand_refusals_change_nothing() {
    on_both!(snoozes);
}

async fn snoozes<T: RetryTokens>(tokens: Tokens<T>) {
    let handler = Handler::new(Does::Fail);
    let put_back = PutBack::default();
    let service = RetryTokenLayer::new(&tokens, key, attempt)
        .schedule(plain())
        .defer(put_back.clone())
        .layer(handler.clone());
    run(&service, Job::new("a", 1)).await.unwrap_err();
    sleep(SECOND).await;
    run(&service, Job::new("a", 2)).await.unwrap_err();
    for result in join_all((0..1000).map(|_| run(&service, Job::new("a", 3)))).await {
        assert_eq!(refusal(&result).not_before().unwrap().streak, 2);
    }
    let refusals = put_back.all().iter().filter(|deferral| deferral.why.is_refusal()).count();
    assert_eq!((refusals, handler.runs()), (1000, 2));
    // sidekiq/sidekiq#6010: refusals and failures are counted apart.
    assert_eq!((tokens.counts().granted, tokens.counts().deferred), (2, 1000));
    sleep(2 * SECOND).await;
    run(&service, Job::new("a", 3)).await.unwrap_err();
    let last = *put_back.all().last().unwrap();
    assert_eq!((last.why, last.streak), (DeferredBy::Failure, 3));
    assert!(last.wait > MS(3990) && last.wait <= 4 * SECOND, "{last:?}");
}

// bensheldon/good_job#603: jobs over the limit came back at random, and slots were idle meanwhile.
// maxcountryman/underway#117: the delay was measured from the job's creation, and an old one had none.
#[tokio::test(start_paused = true)]
async fn good_job_603_underway_117_a_job_comes_back_when_its_key_opens() {
    on_both!(comes_back);
}

async fn comes_back<T: RetryTokens>(tokens: Tokens<T>) {
    let put_back = PutBack::default();
    let handler = Handler::new(Does::Take(3 * SECOND, false));
    let minute = Schedule::new().growth(60 * SECOND, 2.0, 600 * SECOND).unwrap().jitter(0.0).unwrap();
    let service = RetryTokenLayer::new(&tokens, key, attempt)
        .schedule(minute)
        .defer(put_back.clone())
        .layer(handler.clone());
    // It was created an hour ago.
    advance(3600 * SECOND).await;
    let started = Instant::now();
    run(&service, Job::new("old", 1)).await.unwrap_err();
    // The run's own time is part of the wait.
    let failure = put_back.all()[0];
    assert_eq!(failure.why, DeferredBy::Failure);
    sleep(failure.wait).await;
    assert!(started.elapsed() >= 60 * SECOND && started.elapsed() < 61 * SECOND);
    // It is granted at its first try: no early claim was made, and none is wasted.
    run(&service, Job::new("old", 2)).await.unwrap_err();
    assert_eq!((handler.runs(), tokens.counts().deferred), (2, 0));
}

// taskforcesh/bullmq#2193, PR #2403: with a wait of zero the job stayed active.
#[tokio::test(start_paused = true)]
async fn bullmq_2193_a_wait_of_nothing_still_puts_the_job_back() {
    on_both!(puts_back);
}

async fn puts_back<T: RetryTokens>(tokens: Tokens<T>) {
    let put_back = PutBack::default();
    // The run outlives its wait: nothing is left of it when it fails.
    let handler = Handler::new(Does::Take(90 * SECOND, false));
    let service = RetryTokenLayer::new(&tokens, key, attempt)
        .schedule(plain())
        .outcome(|result: std::result::Result<&(), &(dyn Error + 'static)>| match result {
            Ok(()) => Outcome::Success,
            Err(_) => Outcome::Failure { retry_after: Some(Duration::ZERO) },
        })
        .defer(put_back.clone())
        .layer(handler);
    run(&service, Job::new("a", 1)).await.unwrap_err();
    let [failure] = put_back.all()[..] else { panic!("put back once") };
    assert!(failure.wait > Duration::ZERO && failure.wait <= SECOND, "{failure:?}");
}

fn after(wait: Duration) -> impl Fn(std::result::Result<&(), &(dyn Error + 'static)>) -> Outcome + Clone {
    move |result| match result {
        Ok(()) => Outcome::Success,
        Err(_) => Outcome::Failure { retry_after: Some(wait) },
    }
}

// sidekiq/sidekiq#5324, sidekiq/sidekiq#6990: jitter swamped a delay that was asked for. Here a hint is a floor.
#[tokio::test(start_paused = true)]
async fn sidekiq_5324_6990_a_hint_extends_and_never_shortens() {
    on_both!(hints);
}

async fn hints<T: RetryTokens>(tokens: Tokens<T>) {
    let put_back = PutBack::default();
    let handler = Handler::new(Does::Fail);
    let twenty = Schedule::new().growth(20 * SECOND, 2.0, 600 * SECOND).unwrap().jitter(0.0).unwrap();
    for (name, hint, least) in [
        ("longer", 90 * SECOND, 90_u64),
        ("shorter", SECOND, 20),
        ("none", Duration::ZERO, 20),
        ("absurd", Duration::MAX, 24 * 3600),
    ] {
        let service = RetryTokenLayer::new(&tokens, key, attempt)
            .schedule(twenty)
            .outcome(after(hint))
            .defer(put_back.clone())
            .layer(handler.clone());
        run(&service, Job::new(name, 1)).await.unwrap_err();
        let token = tokens.store().peek(name).await.unwrap().unwrap();
        let (least, most) = (MS(least * 1000 - 10), MS(least * 1000));
        assert!((least..=most).contains(&token.wait), "{name}: {token:?}");
        let failure = *put_back.all().last().unwrap();
        assert!((least..=most).contains(&failure.wait), "{name}: {failure:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_neither_keeps_its_wait() {
    on_both!(neither);
}

async fn neither<T: RetryTokens>(tokens: Tokens<T>) {
    let put_back = PutBack::default();
    let service = RetryTokenLayer::new(&tokens, key, attempt)
        .schedule(plain())
        .outcome(|_: std::result::Result<&(), &(dyn Error + 'static)>| Outcome::Neutral)
        .defer(put_back.clone())
        .layer(Handler::new(Does::Succeed));
    run(&service, Job::new("a", 1)).await.unwrap();
    assert_eq!(refusal(&run(&service, Job::new("a", 2)).await).not_before().unwrap().streak, 1);
    assert_eq!(put_back.all().len(), 1, "the refusal alone");
}

/// By default a refusal from further in is no failure of the job.
#[tokio::test(start_paused = true)]
async fn a_refusal_from_further_in_is_handed_on_and_no_failure() {
    let (outer, inner) = (Tokens::new("outer", Remote::new()), Tokens::new("inner", Remote::new()));
    let put_back = PutBack::default();
    let service = ServiceBuilder::new()
        .layer(RetryTokenLayer::new(&outer, key, attempt).schedule(plain()).defer(put_back.clone()))
        .layer(RetryTokenLayer::new(&inner, key, attempt))
        .service(Handler::new(Does::Succeed));
    inner.store().claim("a", &plain()).await.unwrap();
    assert_eq!(&*refusal(&run(&service, Job::new("a", 1)).await).provider, "inner");
    assert_eq!(put_back.all(), []);
}

// --------------------------------------------------------------------------------------------- the herd

/// 500 jobs of one key are refused together: they come back spread, and the store is asked little for a grant.
#[tokio::test(start_paused = true)]
async fn five_hundred_that_are_refused_together_do_not_come_back_together() {
    let tokens = Tokens::new("jobs", Remote::new());
    let put_back = PutBack::default();
    let layer = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).defer(put_back.clone());
    let handler = Handler::new(Does::Fail);
    let service = layer.layer(handler.clone());
    try_run(&service, Job::new("a", 1)).await;
    join_all((0..500).map(|_| run(&service, Job::new("a", 2)))).await;
    let mut waits: Vec<Duration> = put_back
        .all()
        .iter()
        .filter(|deferral| deferral.why.is_refusal())
        .map(|deferral| deferral.wait)
        .collect();
    waits.sort_unstable();
    assert_eq!(waits.len(), 500);
    // At least the wait, or a second; and another second wide.
    let (first, last) = (waits[0], waits[499]);
    assert!(
        first >= MS(995) && last <= 2 * SECOND && last.abs_diff(first) > MS(900),
        "{first:?} to {last:?}"
    );
    // Of ten tenths of that second none has more than twice its share.
    let mut tenths = [0; 11];
    waits.iter().for_each(|wait| tenths[(wait.abs_diff(first).as_millis() / 100) as usize] += 1);
    assert!(tenths.iter().all(|n| *n <= 100), "{tenths:?}");
    // One statement for a claim, granted or not; none for a failure.
    assert_eq!(tokens.store().asked(), 501);
    let asked = tokens.store().asked();
    handler.set(Does::Succeed);
    run(&service, Job::new("b", 1)).await.unwrap();
    assert_eq!(tokens.store().asked() - asked, 2, "claim and clear");
}

#[tokio::test(start_paused = true)]
async fn min_wait_is_the_least_and_the_spread() {
    for least in [MS(10), 5 * SECOND] {
        let tokens = Tokens::with("jobs", Remote::new(), TokenSettings::new().min_wait(least)).unwrap();
        let service =
            RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(Handler::new(Does::Fail));
        try_run(&service, Job::new("a", 1)).await;
        for _ in 0..100 {
            let result = run(&service, Job::new("a", 2)).await;
            let (wait, told) =
                (refusal(&result).wait().unwrap(), refusal(&result).not_before().unwrap().wait);
            let floor = told.max(least);
            assert!(wait >= floor && wait <= floor + least, "{wait:?}, closed for {told:?}");
        }
    }
}

// celery/celery#10456: options that all callers shared were changed by one.
#[tokio::test(start_paused = true)]
async fn celery_10456_no_two_layers_nor_clones_draw_the_same() {
    let waits = |seed: Option<u64>| async move {
        let mut settings = TokenSettings::new();
        settings.seed = seed;
        let tokens = Tokens::with("jobs", LocalTokens::new(), settings).unwrap();
        let service = RetryTokenLayer::new(&tokens, key, attempt).layer(Handler::new(Does::Fail));
        try_run(&service, Job::new("a", 1)).await;
        let mut waits = Vec::new();
        for clone in [service.clone(), service.clone()] {
            for _ in 0..8 {
                let result = run(&clone, Job::new("a", 2)).await;
                let refusal = refusal(&result);
                waits.push(refusal.wait().unwrap().abs_diff(refusal.not_before().unwrap().wait));
            }
        }
        waits
    };
    let first = waits(None).await;
    assert_ne!(first[..8], first[8..], "two clones");
    assert_ne!(first, waits(None).await, "two processes");
    // A layer that is changed is another one.
    let tokens = Tokens::new("jobs", LocalTokens::new());
    let layer = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain());
    let other = layer.clone().schedule(Schedule::new().growth(60 * SECOND, 2.0, 60 * SECOND).unwrap());
    let (service, other) = (layer.layer(Handler::new(Does::Fail)), other.layer(Handler::new(Does::Fail)));
    try_run(&service, Job::new("a", 1)).await;
    try_run(&other, Job::new("b", 1)).await;
    assert_eq!(tokens.store().peek("a").await.unwrap().unwrap().wait, SECOND);
    assert!(tokens.store().peek("b").await.unwrap().unwrap().wait > 40 * SECOND);
}

// qf-studio/pilot#4394: one way to pick a job up again went around the back-off, and it ran five times in 15 minutes.
#[tokio::test(start_paused = true)]
async fn pilot_4394_every_way_to_a_run_leads_through_the_token() {
    let tokens = Tokens::new("jobs", Remote::new());
    let handler = Handler::new(Does::Fail);
    let layer = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain());
    let mut service = layer.layer(handler.clone());
    try_run(&service, Job::new("a", 1)).await;
    // A clone, a service made ready before, one of the same layer, one of another layer over the same tokens, and a
    // clone of an earlier clone that was made ready and left.
    let mut ready = service.clone();
    ServiceExt::<Job>::ready(&mut ready).await.unwrap();
    let (ready_clone, fresh) = (ready.clone(), layer.layer(handler.clone()));
    let other = RetryTokenLayer::new(&tokens.clone(), key, attempt).layer(handler.clone());
    refusal(&ready.call(Job::new("a", 2)).await);
    refusal(&ServiceExt::<Job>::ready(&mut service).await.unwrap().call(Job::new("a", 2)).await);
    for worker in [ready_clone, fresh, service] {
        refusal(&run(&worker, Job::new("a", 2)).await);
        // Whatever the queue says of the attempt.
        refusal(&run(&worker, Job::new("a", 1)).await);
        refusal(&run(&worker, Job::new("a", 0)).await);
        refusal(&run(&worker, Job::new("a", u32::MAX)).await);
    }
    refusal(&run(&other, Job::new("a", 2)).await);
    assert_eq!(handler.runs(), 1);
}

// --------------------------------------------------------------------------------------- store outages

#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<String>>>);

impl Told {
    fn tokens(&self, policy: OnOutage) -> Tokens<Remote> {
        let told = self.0.clone();
        Tokens::with("jobs", Remote::new(), TokenSettings::new().on_outage(policy).seed(1)).unwrap().on_alert(
            move |alert| told.lock().unwrap().push(format!("{}: {}", alert.policy.as_str(), alert.error)),
        )
    }
    fn alerts(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// Comes with this attempt every 100 ms; how often it ran.
async fn comes_for<S>(service: &S, handler: &Handler, name: &str, attempt: u32, time: Duration) -> usize
where
    S: Service<Job, Error = tower::BoxError> + Clone,
    S::Response: std::fmt::Debug,
{
    let (before, start) = (handler.runs(), Instant::now());
    while start.elapsed() < time {
        try_run(service, Job::new(name, attempt)).await;
        sleep(MS(100)).await;
    }
    handler.runs() - before
}

#[tokio::test(start_paused = true)]
async fn without_a_store_the_policy_decides_and_first_attempts_run() {
    for health in [Health::Down, Health::Slow] {
        for policy in [OnOutage::Local, OnOutage::Open, OnOutage::Closed] {
            let told = Told::default();
            let tokens = told.tokens(policy);
            let handler = Handler::new(Does::Fail);
            let service =
                RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
            let case = format!("{health:?}, {policy:?}");
            // The key is known, and closed for 8 s.
            for n in 1..=4 {
                assert!(run(&service, Job::new("known", n)).await.unwrap_err().is::<Failed>(), "{case}");
                sleep([SECOND, 2 * SECOND, 4 * SECOND, MS(0)][n as usize - 1]).await;
            }
            tokens.store().set(health);
            let ran = comes_for(&service, &handler, "known", 5, 7 * SECOND).await;
            match policy {
                OnOutage::Open => assert!(ran > 50, "{case}: {ran}"),
                // What is warm knows the wait.
                _ => assert_eq!(ran, 0, "{case}"),
            }
            assert!(tokens.is_down());
            let ran = comes_for(&service, &handler, "known", 5, 20 * SECOND).await;
            match policy {
                // After the rest of 8 s, and after 16 more.
                OnOutage::Local => assert_eq!(ran, 2, "{case}"),
                OnOutage::Open => assert!(ran > 150, "{case}: {ran}"),
                _ => assert_eq!(ran, 0, "{case}"),
            }
            // First attempts run, of known and unknown keys.
            let before = handler.runs();
            for name in ["known", "new", "new"] {
                assert!(run(&service, Job::new(name, 1)).await.unwrap_err().is::<Failed>(), "{case}");
            }
            assert_eq!(handler.runs() - before, 3, "{case}");
            if policy == OnOutage::Closed {
                let result = run(&service, Job::new("new", 2)).await;
                let wait = refusal(&result).not_before().unwrap();
                assert_eq!(wait.cause, WaitCause::StoreDown);
                assert!(wait.wait > Duration::ZERO && wait.wait <= 30 * SECOND, "{wait:?}");
            }
            // One alert, whatever failed since; and it answers again.
            let error = if health == Health::Down { "connection refused" } else { "no answer within 250ms" };
            assert_eq!(told.alerts(), [format!("{}: {error}", policy.as_str())], "{case}");
            tokens.store().set(Health::Well);
            comes_for(&service, &handler, "other", 2, 31 * SECOND).await;
            assert!(!tokens.is_down(), "{case}");
            tokens.store().set(health);
            try_run(&service, Job::new("new", 1)).await;
            assert_eq!(told.alerts().len(), 2, "{case}: another outage");
        }
    }
}

/// A store that does not answer costs its timeout once a back-off, not each job.
#[tokio::test(start_paused = true)]
async fn a_dead_store_does_not_cost_each_job_its_timeout() {
    let told = Told::default();
    let tokens = told.tokens(OnOutage::Local);
    let service = RetryTokenLayer::new(&tokens, key, attempt).layer(AtOnce);
    tokens.store().set(Health::Slow);
    let start = Instant::now();
    let mut waited = Duration::ZERO;
    let mut jobs = 0;
    while start.elapsed() < 300 * SECOND {
        let began = Instant::now();
        run(&service, Job::new(&jobs.to_string(), 1)).await.unwrap();
        assert!(began.elapsed() <= MS(500), "claim and clear at most");
        waited += began.elapsed();
        jobs += 1;
        sleep(MS(20)).await;
    }
    let asked = tokens.store().asked();
    // 1, 2, 4, 8, 16 s and then 30, of which half to all.
    assert!((10..=30).contains(&asked), "{asked}");
    assert!(
        waited <= MS(250) * u32::try_from(asked).unwrap() && jobs > 14_000,
        "{jobs} jobs waited {waited:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_lost_before_the_clearing_costs_one_wait() {
    for health in [Health::Down, Health::Slow] {
        let told = Told::default();
        let tokens = told.tokens(OnOutage::Local);
        let handler = Handler::new(Does::Take(SECOND / 2, true));
        let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
        let job = tokio::spawn({
            let service = service.clone();
            async move { run(&service, Job::new("a", 1)).await }
        });
        sleep(SECOND / 4).await;
        tokens.store().set(health);
        job.await.unwrap().unwrap();
        assert_eq!(told.alerts().len(), 1);
        tokens.store().set(Health::Well);
        // Asked again by a job that may be refused: its token is open by then, or it is not.
        sleep(2 * SECOND).await;
        run(&service, Job::new("a", 1)).await.unwrap();
        assert_eq!(tokens.store().tokens.len(), 0);
    }
}

/// What was granted without the store is settled without it, too.
#[tokio::test(start_paused = true)]
async fn a_run_that_the_store_does_not_know_is_not_told_to_it() {
    let told = Told::default();
    let tokens = told.tokens(OnOutage::Local);
    let handler = Handler::new(Does::Take(5 * SECOND, true));
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    tokens.store().set(Health::Down);
    let job = tokio::spawn({
        let service = service.clone();
        async move { run(&service, Job::new("a", 2)).await }
    });
    sleep(2 * SECOND).await;
    tokens.store().set(Health::Well);
    run(&service, Job::new("b", 1)).await.unwrap();
    let clears = tokens.store().clears();
    job.await.unwrap().unwrap();
    assert_eq!(tokens.store().clears(), clears);
}

/// A run that succeeded is known to have, whoever was refused meanwhile.
#[tokio::test(start_paused = true)]
async fn what_succeeded_is_not_closed_without_the_store() {
    let told = Told::default();
    let tokens = told.tokens(OnOutage::Local);
    let handler = Handler::new(Does::Take(SECOND, true));
    let schedule = Schedule::new().growth(60 * SECOND, 2.0, 600 * SECOND).unwrap();
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(schedule).layer(handler.clone());
    let job = tokio::spawn({
        let service = service.clone();
        async move { run(&service, Job::new("a", 1)).await }
    });
    sleep(SECOND / 2).await;
    refusal(&run(&service, Job::new("a", 2)).await);
    job.await.unwrap().unwrap();
    tokens.store().set(Health::Down);
    run(&service, Job::new("a", 2)).await.unwrap();
    // And what did not is.
    refusal(&{
        assert!(timeout(SECOND / 2, run(&service, Job::new("b", 2))).await.is_err());
        run(&service, Job::new("b", 2)).await
    });
}

// ---------------------------------------------------------------------------------- tokens in memory

#[tokio::test(start_paused = true)]
async fn a_full_table_refuses_what_it_does_not_know_and_forgets_what_is_open() {
    let store = LocalTokens::seeded(16, 1);
    let tokens = Tokens::new("jobs", store.clone());
    let handler = Handler::new(Does::Fail);
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    // One for each of its 16 parts at most.
    for n in 0..1000 {
        try_run(&service, Job::new(&n.to_string(), 1)).await;
    }
    assert_eq!((store.len(), handler.runs()), (16, 1000), "first attempts run");
    let results = join_all((1000..1100).map(|n| run(&service, Job::new(&format!("retry {n}"), 2)))).await;
    for result in &results {
        let wait = refusal(result).not_before().unwrap();
        assert_eq!((wait.cause, wait.streak), (WaitCause::Full, 0));
        assert!(wait.wait > Duration::ZERO && wait.wait <= SECOND);
    }
    // A key that it knows is answered as ever.
    let known = (0..1000).find(|n| store.claim(&n.to_string(), &plain()).now_or_never_is_token());
    assert!(known.is_some());
    sleep(SECOND).await;
    try_run(&service, Job::new("retry", 2)).await;
    assert_eq!((store.len(), handler.runs()), (16, 1001), "what is open gives way");
}

trait IsToken {
    fn now_or_never_is_token(self) -> bool;
}

impl<F: Future<Output = std::result::Result<Claim, std::convert::Infallible>>> IsToken for F {
    fn now_or_never_is_token(self) -> bool {
        let claim = futures_util::FutureExt::now_or_never(self);
        matches!(claim, Some(Ok(Claim::NotBefore(Wait { cause: WaitCause::Token, .. }))))
    }
}

#[tokio::test(start_paused = true)]
async fn sweeping_leaves_what_is_live_and_what_is_young() {
    let store = LocalTokens::new();
    let (short, long) = (plain(), Schedule::new().growth(3600 * SECOND, 1.0, 3600 * SECOND).unwrap());
    for n in 0..100 {
        store.claim(&format!("old {n}"), &short).await.unwrap();
        store.claim(&format!("live {n}"), &long).await.unwrap();
    }
    sleep(600 * SECOND).await;
    store.claim("young", &short).await.unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(store.sweep(120 * SECOND, 30).await.unwrap(), 30);
    assert_eq!(store.sweep(120 * SECOND, 1000).await.unwrap(), 70);
    assert_eq!(store.sweep(120 * SECOND, 1000).await.unwrap(), 0);
    assert_eq!(store.len(), 101);
}

#[tokio::test(start_paused = true)]
async fn of_concurrent_success_and_claim_neither_gets_lost() {
    let tokens = Tokens::new("jobs", Remote::new());
    let handler = Handler::new(Does::Take(SECOND, true));
    let service = RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).layer(handler.clone());
    // The wait is over at the instant at which the run is: the claim of one and the clearing of the other race.
    for n in 0..50 {
        let name = format!("job {n}");
        let first = run(&service, Job::new(&name, 1));
        let second = async {
            sleep(MS(998 + n % 10)).await;
            run(&service, Job::new(&name, 2)).await
        };
        let (first, second) = tokio::join!(first, second);
        first.unwrap();
        if second.is_err() {
            refusal(&second);
        }
        sleep(3 * SECOND).await;
        let left = tokens.store().peek(&name).await.unwrap();
        assert!(left.is_none_or(|token| token.wait.is_zero()), "{left:?}");
    }
}

// ------------------------------------------------------------------------------------ switch and events

#[tokio::test(start_paused = true)]
async fn observed_it_counts_and_off_it_does_nothing() {
    on_both!(switched);
}

async fn switched<T: RetryTokens>(tokens: Tokens<T>) {
    let switch = Switch::new(Mode::Observe);
    let handler = Handler::new(Does::Fail);
    let service =
        RetryTokenLayer::new(&tokens, key, attempt).schedule(plain()).switch(&switch).layer(handler.clone());
    for attempt in 1..=5 {
        assert!(run(&service, Job::new("a", attempt)).await.unwrap_err().is::<Failed>());
    }
    assert_eq!((switch.would_refuse(), tokens.counts().granted, tokens.counts().deferred), (4, 1, 0));
    switch.set(Mode::Enforce);
    refusal(&run(&service, Job::new("a", 6)).await);
    switch.set(Mode::Off);
    assert!(run(&service, Job::new("a", 6)).await.unwrap_err().is::<Failed>());
    assert_eq!((switch.would_refuse(), tokens.counts().granted, handler.runs()), (4, 1, 6));
}

#[derive(Default)]
struct Events {
    refused: AtomicU64,
    lost: AtomicU64,
    back: AtomicU64,
}

struct Listen(Arc<Events>);

impl Observe for Listen {
    fn observe(&self, event: &Event<'_>) {
        let events = &self.0;
        match *event {
            Event::Refused { provider: "jobs", scope: None, kind: RefusalKind::NotBefore, .. } => {
                &events.refused
            }
            Event::Store { store: "jobs", down: true, .. } => &events.lost,
            Event::Store { store: "jobs", down: false, .. } => &events.back,
            ref other => panic!("{other:?}"),
        }
        .fetch_add(1, Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn what_happens_is_told() {
    let events = Arc::new(Events::default());
    let tokens = Tokens::new("jobs", Remote::new()).observe(Listen(events.clone()));
    let service = RetryTokenLayer::new(&tokens, key, attempt).layer(Handler::new(Does::Fail));
    for attempt in 1..=4 {
        try_run(&service, Job::new("a", attempt)).await;
    }
    tokens.store().set(Health::Down);
    for _ in 0..4 {
        try_run(&service, Job::new("b", 1)).await;
    }
    tokens.store().set(Health::Well);
    sleep(SECOND).await;
    try_run(&service, Job::new("c", 1)).await;
    let count = |count: &AtomicU64| count.load(Relaxed);
    assert_eq!((count(&events.refused), count(&events.lost), count(&events.back)), (3, 1, 1));
}

/// An adapter whose own store is lost.
#[derive(Clone)]
struct Broken;

impl Defer<Job> for Broken {
    type Handle = ();
    type Error = Lost;
    fn handle(&self, _: &Job) {}
    async fn defer(&self, (): (), _: Deferral) -> std::result::Result<(), Lost> {
        sleep(MS(5)).await;
        Err(Lost)
    }
}

#[tokio::test(start_paused = true)]
async fn a_job_that_cannot_be_put_back_still_gets_its_own_error() {
    let tokens = Tokens::new("jobs", LocalTokens::new());
    let service = RetryTokenLayer::new(&tokens, key, attempt).defer(Broken).layer(Handler::new(Does::Fail));
    let result: Result<()> = run(&service, Job::new("a", 1)).await;
    assert!(result.unwrap_err().is::<Failed>());
    refusal(&run(&service, Job::new("a", 2)).await);
}

#[test]
fn settings_that_cannot_be_meant_name_their_field() {
    let new = TokenSettings::new;
    for (settings, field) in [
        (new().timeout(Duration::ZERO), "timeout"),
        (new().timeout(Duration::MAX), "timeout"),
        (new().min_wait(Duration::ZERO), "min_wait"),
        (new().asks(Duration::ZERO, SECOND), "first_ask"),
        (new().asks(SECOND, MS(1)), "last_ask"),
    ] {
        assert_eq!(Tokens::with("jobs", LocalTokens::new(), settings).unwrap_err().field, field);
    }
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_question_can_be_set() {
    for time in [MS(20), 2 * SECOND] {
        let tokens = Tokens::with("jobs", Remote::new(), TokenSettings::new().timeout(time)).unwrap();
        tokens.store().set(Health::Slow);
        let start = Instant::now();
        let service = RetryTokenLayer::new(&tokens, key, attempt).layer(AtOnce);
        run(&service, Job::new("a", 1)).await.unwrap();
        assert!(start.elapsed() >= time && start.elapsed() < time + MS(10));
    }
}
