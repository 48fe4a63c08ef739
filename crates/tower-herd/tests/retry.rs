//! The retry layer over time, under a paused clock.

mod retry_support;

use retry_support::*;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_herd::{
    Backoff, Budget, Executed, HasTask, JitteredRetryLayer, Kind, RatioBudget, Refusal, RefusalKind, Safety,
    Task,
    observe::{Event, Observe},
    retry::{InvalidRetryConfig, Never, RetryConfig, Unlimited},
};

#[tokio::test(start_paused = true)]
async fn a_success_is_returned_and_clones_nothing() {
    let (service, seen) = provider([Status(200)]);
    let mut stack = retry().layer(service);
    let before = seen.clones.load(Ordering::Relaxed);
    for _ in 0..3 {
        let reply = ServiceExt::<Request>::ready(&mut stack).await.unwrap().call(get()).await;
        assert_eq!((status(&reply), stamp(&reply)), (200, None));
    }
    assert_eq!((seen.count(), seen.clones.load(Ordering::Relaxed)), (3, before));
}

#[tokio::test(start_paused = true)]
async fn never_earlier_than_the_hint_and_not_later_than_half_of_it() {
    for (code, seed) in (0..50).flat_map(|seed| [(429, seed), (503, seed)]) {
        let (reply, seen) = run(retry().seed(seed), get(), [Hint(code, 20), Status(200)]).await;
        assert_eq!(status(&reply), 200);
        let gap = seen.gaps()[0];
        assert!(S(20) <= gap && gap <= S(30) + MS(1), "{gap:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_bound_doubles_from_its_base_up_to_the_cap() {
    let task = Task::new(1).allowance(10).deadline_in(S(3600));
    let mut longest = [Duration::ZERO; 6];
    for seed in 0..60 {
        let layer = retry().seed(seed).attempts(7).cap(S(4));
        let task = task.clone().allowance(10);
        let (reply, seen) = run(layer, of(&task, get()), [Status(500)]).await;
        assert_eq!((status(&reply), seen.count()), (500, 7));
        for (most, gap) in longest.iter_mut().zip(seen.gaps()) {
            *most = gap.max(*most);
        }
    }
    for (most, bound) in longest.iter().zip([500, 1000, 2000, 4000, 4000, 4000]) {
        assert!(*most <= MS(bound + 1) && *most >= MS(bound * 8 / 10), "{longest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_smaller_allowance_binds() {
    for (layer, task, calls) in [(3, 9, 3), (9, 2, 2), (1, 9, 1), (9, 1, 1)] {
        let task = Task::new(1).allowance(task);
        let (reply, seen) = run(retry().attempts(layer), of(&task, get()), [Status(500)]).await;
        assert_eq!((status(&reply), seen.count()), (500, calls));
        assert_eq!(stamp(&reply).unwrap().attempts, calls as u32);
        assert_eq!(task.spent() as usize, calls - 1, "each failed call that was repeated is charged");
    }
    // What other layers charged to the task counts.
    let task = Task::new(1);
    task.charge();
    let (_, seen) = run(retry(), of(&task, get()), [Status(500)]).await;
    assert_eq!(seen.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn throttled_is_delivered_again_ten_times_and_not_charged() {
    let task = Task::new(1).deadline_in(S(3600));
    let (reply, seen) = run(retry(), of(&task, post()), [Hint(429, 1)]).await;
    assert_eq!((status(&reply), seen.count()), (429, 11));
    assert_eq!((task.spent(), task.redelivered()), (0, 10));
    let mark = stamp(&reply).unwrap();
    assert_eq!(mark.attempts, 11);
    assert!(mark.retry_at.unwrap() >= Instant::now() + S(1), "the mark says when");
    let (_, seen) = run(retry().redeliveries(2), get(), [Hint(429, 1)]).await;
    assert_eq!(seen.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_does_not_fit_is_answered_at_once() {
    let start = Instant::now();
    let (reply, seen) = run(retry(), get(), [Hint(429, 61), Status(200)]).await;
    assert_eq!((status(&reply), seen.count()), (429, 1));
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(stamp(&reply).unwrap().retry_at.unwrap() >= start + S(61));
    // The default of the layer gives way to the task's own deadline.
    let task = Task::new(1).deadline_in(S(120));
    let (reply, _) = run(retry(), of(&task, get()), [Hint(429, 61), Status(200)]).await;
    assert_eq!(status(&reply), 200);
    let (reply, _) = run(retry().deadline(S(120)), get(), [Hint(429, 61), Status(200)]).await;
    assert_eq!(status(&reply), 200);
}

#[tokio::test(start_paused = true)]
async fn without_a_deadline_the_time_of_the_attempts_counts() {
    let start = Instant::now();
    let (reply, seen) = run(retry(), get(), [Slow(500, S(61)), Status(200)]).await;
    assert_eq!((status(&reply), seen.count(), start.elapsed()), (500, 1, S(61)));
}

#[tokio::test(start_paused = true)]
async fn no_attempt_starts_after_the_deadline() {
    for seed in 0..200 {
        let start = Instant::now();
        let task = Task::new(seed).allowance(99).deadline_in(S(7));
        let layer = retry().seed(seed).attempts(99);
        let (service, seen) = provider([Hint(503, 2)]);
        let reply = send(&layer, &service, of(&task, get())).await;
        assert_eq!(status(&reply), 503);
        assert!(start.elapsed() < S(7), "{:?}", start.elapsed());
        assert!(seen.gaps().iter().all(|gap| *gap >= S(2)) && seen.count() >= 3, "{:?}", seen.at());
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_is_not_waited_for_beyond_the_deadline() {
    let start = Instant::now();
    let (service, seen) = never_ready_again([Status(500)]);
    let reply = send(&retry(), &service, get()).await;
    assert_eq!((status(&reply), seen.count()), (500, 1));
    assert!(S(59) <= start.elapsed() && start.elapsed() <= S(60) + MS(1));
    assert!(stamp(&reply).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_failing_readiness_is_a_failed_attempt() {
    let (reply, seen) = run(retry(), post(), [Hint(429, 1), NotReady, Status(200)]).await;
    assert_eq!((status(&reply), seen.count()), (200, 2));
}

#[tokio::test(start_paused = true)]
async fn safety_and_evidence_decide() {
    let timeout = || Error("timed out", S(1));
    let keyed = || http::Request::put("/").body(String::new()).unwrap();
    for (request, first, calls) in [
        (get(), timeout(), 2),
        (post(), timeout(), 1),
        (post(), Error("refused", S(0)), 2),
        (post(), Status(500), 1),
        (post(), Hint(503, 1), 1),
        (post(), Status(429), 2),
        (post(), Status(425), 2),
        (get(), Status(501), 1),
        (get(), Status(404), 1),
        (get(), Status(402), 1),
        (get(), Status(401), 1),
        (get(), Status(204), 1),
        (keyed(), Status(500), 2),
    ] {
        let what = format!("{} after {first:?}", request.method());
        let (reply, seen) = run(retry(), request, [first, Status(200)]).await;
        assert_eq!(seen.count(), calls, "{what}");
        assert!(stamp(&reply).is_none(), "{what}: nothing was given up");
    }
    let (_, seen) = run(retry().same_domain(false), keyed(), [Status(500), Status(200)]).await;
    assert_eq!(seen.count(), 1);
    let mut costly = post();
    costly.extensions_mut().insert(Safety::Costly);
    let (_, seen) = run(retry(), costly, [timeout(), Status(200)]).await;
    assert_eq!(seen.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_kept_is_sent_once() {
    let start = Instant::now();
    for first in [Status(500), Hint(429, 5), Refuse(RefusalKind::Paused, Some(S(5)))] {
        let (service, seen) = provider([first.clone(), Status(200)]);
        let reply = send(&retry().resend(Never), &service, get()).await;
        assert_eq!((seen.count(), start.elapsed()), (1, Duration::ZERO), "{first:?}");
        // It could have been sent again after the 429, and says so; what the 500 did nobody knows.
        assert_eq!(stamp(&reply).is_some(), status(&reply) == 429);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dry_budget_gives_up_before_it_sleeps() {
    let budget = RatioBudget::new(0.0).reserve(1, S(1000));
    let layer = retry().budget(budget.clone()).attempts(9);
    let task = || Task::new(1).allowance(9);
    let (reply, seen) = run(layer.clone(), of(&task(), get()), [Status(500)]).await;
    assert_eq!((status(&reply), seen.count()), (500, 2));
    let start = Instant::now();
    let (reply, seen) = run(layer.clone(), of(&task(), get()), [Status(500)]).await;
    assert_eq!((seen.count(), start.elapsed()), (1, Duration::ZERO));
    assert!(stamp(&reply).is_some());
    // Flow control is not charged to it.
    let (reply, _) = run(layer, of(&task(), get()), [Hint(429, 1), Status(200)]).await;
    assert_eq!(status(&reply), 200);
}

#[tokio::test(start_paused = true)]
async fn the_budget_is_that_of_the_provider_that_answered() {
    let budget = RatioBudget::new(0.0).reserve(1, S(1000));
    let layer = retry().budget(budget.clone());
    // As a ladder does for its rungs.
    let (a, b) = (budget.open("a").unwrap(), budget.open("b").unwrap());
    let (reply, seen) = run(layer, get(), [From("a", 500), Status(200)]).await;
    assert_eq!(status(&reply), 200);
    assert!(!a.try_withdraw() && b.try_withdraw() && budget.try_withdraw());
    // The ladder says where it went: elsewhere, so the charge is given back.
    let resent = seen.calls.lock().unwrap()[1].2.clone().unwrap();
    assert_eq!((resent.attempt(), resent.provider().map(|p| &**p)), (2, Some("a")));
    resent.went_to("b");
    assert!(a.try_withdraw() && !a.try_withdraw());
}

#[tokio::test(start_paused = true)]
async fn only_so_many_sleep() {
    let layer = retry().max_sleepers(2);
    let (service, seen) = provider([Hint(429, 5), Hint(429, 5), Hint(429, 5), Status(200)]);
    let start = Instant::now();
    let all = (0..3).map(|_| {
        tokio::spawn({
            let (layer, service) = (layer.clone(), service.clone());
            async move { (send(&layer, &service, get()).await, start.elapsed()) }
        })
    });
    let all = futures_util::future::join_all(all.collect::<Vec<_>>()).await;
    let at_once: Vec<_> = all.iter().flatten().filter(|(_, after)| after.is_zero()).collect();
    assert_eq!(at_once.len(), 1);
    assert_eq!(status(&at_once[0].0), 429);
    assert_eq!((seen.count(), layer.sleeping()), (5, 0));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_waited_for_free_of_charge() {
    let paused = |s| Refuse(RefusalKind::Paused, Some(S(s)));
    let task = Task::new(1).allowance(1);
    let layer = retry().budget(RatioBudget::new(0.0).reserve(0, S(9)));
    let (reply, seen) = run(layer.clone(), of(&task, post()), [paused(3), paused(4), Status(200)]).await;
    assert_eq!((status(&reply), seen.count(), task.spent()), (200, 3, 0));
    assert!(seen.gaps()[0] >= S(3) && seen.gaps()[1] >= S(4));
    // It does not fit: the refusal itself, at once, unwrapped.
    let start = Instant::now();
    let (reply, _) = run(layer.clone(), get(), [paused(61)]).await;
    assert_eq!(reply.unwrap_err().downcast::<Refusal>().unwrap().retry_at, Some(start + S(61)));
    assert_eq!(start.elapsed(), Duration::ZERO);
    for terminal in [RefusalKind::Budget, RefusalKind::Exhausted, RefusalKind::Deadline] {
        let (reply, seen) = run(layer.clone(), get(), [Refuse(terminal, Some(S(1)))]).await;
        assert_eq!((reply.unwrap_err().downcast::<Refusal>().unwrap().kind, seen.count()), (terminal, 1));
    }
    // One that ends at once does not spin.
    let start = Instant::now();
    let (reply, seen) = run(layer, get(), [Refuse(RefusalKind::NoSlot, Some(S(0)))]).await;
    assert!(reply.is_err() && start.elapsed() >= S(59) && seen.count() < 1000, "{}", seen.count());
}

#[tokio::test(start_paused = true)]
async fn the_reply_that_is_held_outlives_a_refusal() {
    let budget = RatioBudget::new(0.0).reserve(1, S(1000));
    let refused = |wait| Refuse(RefusalKind::NoSlot, wait);
    let layer = retry().budget(budget.clone());
    let (reply, seen) = run(layer.clone(), get(), [Status(500), refused(Some(S(99)))]).await;
    assert_eq!((status(&reply), seen.count()), (500, 2));
    assert_eq!(stamp(&reply).unwrap().attempts, 1, "a refusal is no wire call");
    assert!(stamp(&reply).unwrap().retry_at.unwrap() > Instant::now() + S(98));
    assert_eq!(budget.balance().floor(), 1.0, "the repetition was not sent");
    let (reply, _) = run(layer.clone(), get(), [Status(500), refused(None)]).await;
    assert_eq!((status(&reply), stamp(&reply).unwrap().retry_at), (500, None));
    // It fits: the one charge serves the repetition that is sent in the end.
    let (reply, seen) = run(layer, get(), [Status(500), refused(Some(S(2))), Status(200)]).await;
    assert_eq!((status(&reply), seen.count(), budget.balance().floor()), (200, 3, 0.0));
}

#[tokio::test(start_paused = true)]
async fn the_last_outcome_is_returned_as_it_is() {
    let (reply, _) = run(retry(), get(), [Status(500), Status(502), Hint(503, 1)]).await;
    assert_eq!((status(&reply), stamp(&reply).unwrap().attempts), (503, 3));
    let (reply, _) = run(retry(), get(), [Status(500), Error("reset", S(0))]).await;
    assert_eq!(reply.unwrap_err().to_string(), "reset");
    let (reply, _) = run(retry(), get(), [Status(500), Status(404)]).await;
    assert_eq!((status(&reply), stamp(&reply).unwrap().attempts), (404, 2));
}

#[tokio::test(start_paused = true)]
async fn a_drop_at_any_moment_leaks_nothing() {
    // Times in ms at which the caller gives up: in the first attempt, in the sleep, in the second.
    for millis in [0, 50, 99, 100, 101, 200, 350, 600, 640, 700] {
        let budget = RatioBudget::new(0.0).reserve(9, S(100_000));
        let layer = retry().budget(budget.clone()).backoff(Backoff::PlusMinus(0.01));
        let (service, seen) = provider([Slow(500, MS(100)), Slow(200, MS(200))]);
        let call = send(&layer, &service, get());
        tokio::time::timeout(MS(millis), call).await.ok();
        assert_eq!((layer.sleeping(), seen.in_flight.load(Ordering::Relaxed)), (0, 0), "after {millis} ms");
        let left = if seen.count() == 2 { 8.0 } else { 9.0 };
        assert_eq!(budget.balance().floor(), left, "after {millis} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_in_flight_while_it_sleeps_and_nothing_sleeps_in_flight() {
    let (service, seen) = provider([Hint(429, 5), Slow(200, S(60))]);
    let layer = retry();
    let mut call = std::pin::pin!(send(&layer, &service, get()));
    tokio::time::timeout(S(3), &mut call).await.unwrap_err();
    assert_eq!((layer.sleeping(), seen.in_flight.load(Ordering::Relaxed)), (1, 0));
    tokio::time::timeout(S(20), &mut call).await.unwrap_err();
    assert_eq!((layer.sleeping(), seen.in_flight.load(Ordering::Relaxed)), (0, 1));
    assert_eq!(status(&call.await), 200);
}

#[tokio::test(start_paused = true)]
async fn copies_are_of_the_same_task_and_say_what_they_are() {
    let task = Task::new("t");
    let (_, seen) = run(retry(), of(&task, get()), [Status(500), Status(429), Status(200)]).await;
    let calls = seen.calls.lock().unwrap();
    assert!(calls.iter().all(|(_, t, _)| t.as_ref().unwrap().is(&task)));
    let attempts: Vec<_> =
        calls.iter().map(|(_, _, r)| r.as_ref().map(tower_herd::retry::Resent::attempt)).collect();
    assert_eq!(attempts, [None, Some(2), Some(3)]);
    let executed: Vec<_> =
        calls.iter().filter_map(|(_, _, r)| r.as_ref().map(tower_herd::retry::Resent::executed)).collect();
    assert_eq!(executed, [Executed::Maybe; 2], "the 429 proves nothing about the call before it");
}

#[tokio::test(start_paused = true)]
async fn two_sessions_draw_their_own_waits_and_a_seed_repeats_them() {
    async fn first_gaps(layer: &JitteredRetryLayer<Understand>) -> Vec<Duration> {
        let mut gaps = Vec::new();
        for _ in 0..8 {
            gaps.push(run(layer.clone(), get(), [Status(500), Status(200)]).await.1.gaps()[0]);
        }
        gaps
    }
    let fixed = first_gaps(&retry().seed(7)).await;
    assert!(fixed.iter().any(|gap| gap != &fixed[0]), "{fixed:?}");
    assert_eq!(fixed, first_gaps(&retry().seed(7)).await);
    assert_eq!(fixed, first_gaps(&retry().seed(3).seed(7)).await);
    assert_ne!(fixed, first_gaps(&retry().seed(8)).await);
    let free = || JitteredRetryLayer::new().budget(Unlimited).classify(Understand);
    assert_ne!(first_gaps(&free()).await, first_gaps(&free()).await);
}

/// Mean of the first wait in ms, over many seeds.
async fn mean_wait(layer: impl Fn() -> JitteredRetryLayer<Understand>, first: Step) -> u128 {
    let mut sum = Duration::ZERO;
    for seed in 0..200 {
        sum += run(layer().seed(seed), get(), [first.clone(), Status(200)]).await.1.gaps()[0];
    }
    sum.as_millis() / 200
}

#[tokio::test(start_paused = true)]
async fn every_option_of_the_wait_changes_it() {
    let near =
        |mean: u128, expected: u128| assert!(mean.abs_diff(expected) * 10 < expected, "{mean} {expected}");
    near(mean_wait(retry, Status(500)).await, 250);
    near(mean_wait(retry, Status(429)).await, 500);
    near(mean_wait(|| retry().base(S(4)), Status(500)).await, 2000);
    near(mean_wait(|| retry().throttled_base(S(4)), Status(429)).await, 2000);
    near(mean_wait(|| retry().base(S(4)).cap(S(1)), Status(500)).await, 500);
    near(mean_wait(|| retry().backoff(Backoff::Equal), Status(500)).await, 375);
    near(mean_wait(|| retry().backoff(Backoff::PlusMinus(0.3)), Status(500)).await, 500);
    near(mean_wait(|| retry().backoff(Backoff::Decorrelated), Status(500)).await, 1000);
}

#[derive(Clone, Default)]
struct Listen(Arc<Mutex<Vec<String>>>);
impl Observe for Listen {
    fn observe(&self, event: &Event<'_>) {
        self.0.lock().unwrap().push(match event {
            Event::Resend { kind, attempt, wait, .. } => {
                assert!(*wait > Duration::ZERO);
                format!("resend {kind:?} {attempt}")
            }
            Event::GaveUp { kind, attempts, why, .. } => format!("gave up {kind:?} {attempts} {why}"),
            other => format!("{other:?}"),
        });
    }
}

#[tokio::test(start_paused = true)]
async fn events_tell_what_was_decided() {
    let listen = Listen::default();
    let layer = retry().observer(listen.clone()).attempts(2);
    run(layer.clone(), get(), [Status(429), Status(500)]).await.0.unwrap();
    assert_eq!(
        *listen.0.lock().unwrap(),
        ["resend Throttled 1", "resend Failed 2", "gave up Failed 3 attempts"]
    );
    listen.0.lock().unwrap().clear();
    run(layer, get(), [Status(200)]).await.0.unwrap();
    assert!(listen.0.lock().unwrap().is_empty());
    let _ = Kind::Success;
}

#[tokio::test(start_paused = true)]
async fn a_config_is_validated_and_used() {
    let mut config = RetryConfig::default();
    config.attempts = 2;
    let layer = JitteredRetryLayer::from_config(config.clone()).unwrap();
    assert_eq!(layer.config(), config);
    let (_, seen) = run(layer.budget(Unlimited).classify(Understand), get(), [Status(500)]).await;
    assert_eq!(seen.count(), 2);
    config.attempts = 0;
    assert_eq!(JitteredRetryLayer::from_config(config).unwrap_err(), InvalidRetryConfig::NoAttempts);
    assert_eq!(retry().attempts(0).config().attempts, 1);
    assert_eq!(retry().base(S(0)).config().base, MS(1));
}

#[tokio::test(start_paused = true)]
async fn a_layer_goes_by_other_settings_while_it_runs() {
    let layer = retry().attempts(4);
    let (provider, seen) = provider([Status(500)]);
    let service = layer.layer(provider);
    let mut sent = 0;
    for attempts in [4, 2, 1, 3] {
        let mut config = layer.config();
        config.attempts = attempts;
        layer.reconfigure(config.clone()).unwrap();
        // What cannot be meant changes nothing.
        config.attempts = 0;
        assert_eq!(layer.reconfigure(config), Err(InvalidRetryConfig::NoAttempts));
        service.clone().oneshot(of(&Task::new(1).allowance(9), get())).await.unwrap();
        assert_eq!(seen.count() - sent, attempts as usize, "in the services that are there already");
        sent = seen.count();
    }
}

// Retry code that is not ours draws on the same task, and says so when it has given up.
#[tokio::test(start_paused = true)]
async fn what_foreign_retry_code_tells_a_task_binds_ours() {
    let calls = async |told: fn(&Task)| {
        let task = Task::new(1).allowance(3);
        let inner = task.clone();
        let (provider, seen) = provider([Status(500)]);
        let foreign = tower::service_fn(move |request: Request| {
            told(&inner);
            provider.clone().oneshot(request)
        });
        retry().attempts(3).layer(foreign).oneshot(of(&task, get())).await.unwrap();
        (seen.count(), task.is_exhausted())
    };
    assert_eq!(calls(|_| ()).await, (3, true));
    // It made a call of its own, which failed.
    assert_eq!(calls(|task| _ = task.charge()).await, (2, true));
    // It has tried what can be tried.
    assert_eq!(calls(Task::give_up).await, (1, true));
    // Re-deliveries are apart from attempts.
    assert_eq!(calls(|task| _ = task.redeliver()).await, (3, true));
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_not_http_are_sent_again_if_they_say_so() {
    #[derive(Clone)]
    struct Read;
    impl HasTask for Read {
        fn safety(&self) -> Safety {
            Safety::Safe
        }
    }
    let (service, seen) = provider([Status(500), Status(200)]);
    retry().layer(service).oneshot(Read).await.unwrap();
    assert_eq!(seen.count(), 2);
    let (service, seen) = provider([Status(500), Status(200)]);
    assert_eq!(retry().layer(service).oneshot(7_u64).await.unwrap().status(), 500);
    assert_eq!(seen.count(), 1, "an unknown request is taken for one that must not be repeated");
}

// PEERS: all second attempts of a peer come within one bucket.
#[tokio::test(start_paused = true)]
async fn a_thousand_clients_that_fail_together_do_not_come_back_together() {
    // Each client is a process of its own: its own layer, seed and budget.
    let (service, seen) = provider(std::iter::repeat_n(Status(500), 1000).chain([Status(200)]));
    let clients = (0..1000).map(|seed| {
        let (layer, service) = (JitteredRetryLayer::new().seed(seed).classify(Understand), service.clone());
        async move { send(&layer, &service, get()).await.unwrap() }
    });
    futures_util::future::join_all(clients).await;
    let mut buckets = BTreeMap::<u128, u32>::new();
    for at in &seen.at()[1000..] {
        *buckets.entry(at.as_millis() / 10).or_default() += 1;
    }
    let largest = buckets.values().max().unwrap();
    assert!(*largest <= 2 * 1000 / 50, "{largest} of 1000 in one of 50 buckets");
}

#[tokio::test(start_paused = true)]
async fn a_thousand_processes_that_are_told_the_same_wait_come_back_spread() {
    let (service, seen) = provider(std::iter::repeat_n(Hint(429, 30), 1000).chain([Status(200)]));
    let clients = (0..1000).map(|seed| {
        let (layer, service) = (JitteredRetryLayer::new().seed(seed).classify(Understand), service.clone());
        async move {
            tokio::time::sleep(MS(seed)).await;
            send(&layer, &service, get()).await.unwrap()
        }
    });
    futures_util::future::join_all(clients).await;
    let mut again = seen.at().split_off(1000);
    again.sort();
    let peak =
        again.iter().map(|at| again.iter().filter(|a| *at <= **a && **a < *at + MS(100)).count()).max();
    assert!(peak.unwrap() <= 22, "{peak:?} in 100 ms");
    assert!(again[0] >= S(30) && again[999] <= S(46) + MS(2));
}

// PEERS: at 50 percent failures and 5 attempts allowed, peers send 1.95 calls a request.
#[tokio::test(start_paused = true)]
async fn half_of_all_calls_fail_and_the_load_stays_within_the_budget() {
    const N: usize = 10_000;
    let coin = (0..2 * N as u64)
        .map(|n| Status(if n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 0 { 200 } else { 500 }));
    let (service, seen) = provider(coin);
    let layer = JitteredRetryLayer::new().seed(1).attempts(5).classify(Understand);
    let all = (0..N as u64).map(|n| {
        let (layer, service) = (layer.clone(), service.clone());
        async move {
            tokio::time::sleep(MS(n * 10)).await;
            status(&send(&layer, &service, of(&Task::new(n).allowance(5), get())).await) == 200
        }
    });
    let done = futures_util::future::join_all(all).await.into_iter().filter(|ok| *ok).count();
    // 100 s: the reserve of 3 refills 10 times.
    assert!(seen.count() <= N + N / 10 + 3 + 10, "{} calls", seen.count());
    assert!(done * 100 >= N * 52, "{done} done");
}
