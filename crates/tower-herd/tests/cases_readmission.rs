//! The ramp after an open breaker or a long pause: what comes back, when, and where the others go meanwhile.

mod common;

use common::{Boxed, Script, answer, ms, request, retrying, rung, secs, until};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_herd::{
    Fleet, HashedFailover, JitteredRetryLayer, Mode, Provider, ProviderSettings, RampedReadmissionLayer,
    Refusal, RefusalKind, Switch, Task, TaskLayer,
    failover::Rung,
    observe::{Event, Observe},
    readmission::Profile,
    retry::Unlimited,
};

/// The ramp, and below it pause, limit and sensor.
fn ramped(provider: &Provider, inner: Script) -> Boxed {
    Boxed::new(RampedReadmissionLayer::new(provider).layer(rung(provider, inner)))
}

fn wide(fleet: &Fleet, name: &str) -> Provider {
    fleet.configure(name, ProviderSettings::new().ceiling(100_000)).unwrap()
}

/// The refusal a call with this key meets; none if it went through.
async fn refused(service: &Boxed, key: u64) -> Option<Refusal> {
    match service.clone().oneshot(request(key)).await {
        Ok(_) => None,
        Err(error) => Some(Refusal::find(&*error).expect("a refusal").clone()),
    }
}

/// The keys that get through.
async fn readmitted(service: &Boxed, keys: std::ops::Range<u64>) -> Vec<u64> {
    let mut through = vec![];
    for key in keys {
        match refused(service, key).await {
            None => through.push(key),
            Some(refusal) => assert_eq!(refusal.kind, RefusalKind::NotReadmitted),
        }
    }
    through
}

/// A key that is back only after `least` seconds of a default ramp, and when that is.
async fn late_key(service: &Boxed, least: u64) -> (u64, Instant) {
    let now = Instant::now();
    for key in 0.. {
        if let Some(at) = refused(service, key).await.and_then(|refusal| refusal.retry_at)
            && at > now + secs(least)
        {
            return (key, at);
        }
    }
    unreachable!("keys are not used up")
}

/// What the observer heard of ramps.
#[derive(Clone, Default)]
struct Steps {
    heard: Arc<Mutex<Vec<Step>>>,
    would_refuse: Arc<AtomicU64>,
}
/// The scope, and the share.
type Step = (Option<String>, f64);

impl Observe for Steps {
    fn observe(&self, event: &Event<'_>) {
        match *event {
            Event::Ramp { scope, share, .. } => {
                self.heard.lock().unwrap().push((scope.map(str::to_owned), share));
            }
            Event::WouldRefuse { kind: RefusalKind::NotReadmitted, .. } => {
                self.would_refuse.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

impl Steps {
    fn shares(&self) -> Vec<f64> {
        self.heard.lock().unwrap().iter().map(|(_, share)| *share).collect()
    }
}

// ------------------------------------------------------------------------------------ when, and how long

#[tokio::test(start_paused = true)]
async fn after_a_long_pause_and_never_after_a_short_one() {
    for (pause, ramps) in [(1, false), (299, false), (300, false), (301, true), (3600, true)] {
        let provider = wide(&Fleet::local(), "p");
        let service = ramped(&provider, Script::always(answer(200)));
        provider.pause_for(secs(pause));
        tokio::time::sleep(secs(pause)).await;
        let through = readmitted(&service, 0..1000).await.len();
        assert_eq!(through < 1000, ramps, "{pause} s: {through}");
        if ramps {
            assert!((30..80).contains(&through), "5 %: {through}");
        }
        tokio::time::sleep(ms(21_700)).await;
        assert_eq!(readmitted(&service, 0..1000).await.len(), 1000);
    }
}

/// Nobody there when it ends: the ramp begins with the first who comes, an hour later.
#[tokio::test(start_paused = true)]
async fn a_pause_that_ended_while_nobody_looked() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(4200)).await;
    assert_eq!(provider.readmitted(), 0.05, "who only reads the share starts nothing");
    tokio::time::sleep(secs(30)).await;
    assert!(readmitted(&service, 0..1000).await.len() < 80);
    tokio::time::sleep(secs(10)).await;
    let third = readmitted(&service, 0..1000).await.len();
    assert!((150..250).contains(&third), "20 %: {third}");
    assert!((provider.readmitted() - 0.2).abs() < 1e-9);
}

/// However it ends: by an operator, who may do so at once, or by a probe.
#[tokio::test(start_paused = true)]
async fn by_an_operator_and_by_a_probe() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    provider.pause_for(secs(3600));
    tokio::time::sleep(secs(10)).await;
    provider.clear_pause();
    assert!(readmitted(&service, 0..1000).await.len() < 80);
    tokio::time::sleep(ms(9990)).await;
    assert!(provider.readmitted() < 1.0);
    tokio::time::sleep(ms(10)).await;
    assert_eq!(provider.readmitted(), 1.0, "it was closed for ten seconds, so it ramps for ten");
    assert_eq!(readmitted(&service, 0..1000).await.len(), 1000);

    let script = Script::always(answer(200));
    let service = ramped(&provider, script.clone());
    provider.pause_for(secs(3600));
    tokio::time::sleep(secs(300)).await;
    // The probe is due: whoever comes first is it, whatever its key.
    assert_eq!(refused(&service, 1).await, None);
    assert!(provider.paused_until().is_none() && script.calls() == 1);
    let through = readmitted(&service, 0..1000).await.len();
    assert!((30..80).contains(&through), "{through}");
}

/// No crowd at the gate for its end: while the pause lasts, each is told its instant after it.
#[tokio::test(start_paused = true)]
async fn who_asks_while_it_is_paused_is_told_its_instant_after() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    let ends = Instant::now() + secs(301);
    provider.pause_for(secs(301));
    tokio::time::sleep(secs(290)).await;
    let (key, at) = late_key(&service, 11 + 5).await;
    assert!(at > ends + secs(5) && at <= ends + ms(21_610), "{:?}", at - ends);
    // And that holds, though nobody asked in between.
    tokio::time::sleep_until(at - ms(1)).await;
    assert_eq!(refused(&service, key).await.and_then(|refusal| refusal.retry_at), Some(at));
    tokio::time::sleep_until(at).await;
    assert_eq!(refused(&service, key).await, None);
}

/// Closed again in the middle of a ramp: what ran is over, and the next one begins at the beginning.
#[tokio::test(start_paused = true)]
async fn another_long_pause_begins_anew() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    for _ in 0..3 {
        provider.pause_for(secs(400));
        tokio::time::sleep(secs(400)).await;
        assert!(readmitted(&service, 0..1000).await.len() < 80);
        tokio::time::sleep(secs(15)).await;
        assert!(readmitted(&service, 0..1000).await.len() > 350);
    }
}

// --------------------------------------------------------------------------------------- which, and where

/// Fifty processes that know nothing of each other: the same tasks in all, never one sent back, and at each
/// instant no more than the share.
#[tokio::test(start_paused = true)]
async fn fifty_processes_readmit_the_same_tasks() {
    const KEYS: u64 = 10_000;
    let fleet: Vec<(Provider, Boxed)> = (0..50)
        .map(|seed| {
            let provider = wide(&Fleet::local().seed(seed), "search");
            let service = ramped(&provider, Script::always(answer(200)));
            (provider, service)
        })
        .collect();
    fleet.iter().for_each(|(provider, _)| provider.pause_for(secs(600)));
    tokio::time::sleep(secs(600)).await;
    let mut before = vec![];
    for second in (0..24).step_by(2) {
        let (provider, first) = &fleet[0];
        let through = readmitted(first, 0..KEYS).await;
        let share = provider.readmitted();
        let most = share * KEYS as f64;
        // Which keys there are is chance: three standard deviations.
        let chance = 3.0 * (most * (1.0 - share)).sqrt();
        assert!((through.len() as f64 - most).abs() <= chance, "{second} s: {} of {most}", through.len());
        assert!(share <= 0.05 * 2f64.powf(f64::from(second) / 5.0) + 1e-9, "{second} s: {share}");
        assert!(before.iter().all(|key| through.binary_search(key).is_ok()), "{second} s: sent back");
        // All others, at some of their keys.
        for (process, (provider, service)) in fleet.iter().enumerate().skip(1) {
            assert_eq!(provider.readmitted(), if second == 0 { 0.05 } else { share });
            let some = process as u64 * 200..process as u64 * 200 + 100;
            let theirs = readmitted(service, some.clone()).await;
            let ours: Vec<u64> = through.iter().copied().filter(|key| some.contains(key)).collect();
            assert_eq!(theirs, ours, "{second} s, process {process}");
        }
        before = through;
        tokio::time::sleep(secs(2)).await;
    }
    assert_eq!(before.len() as u64, KEYS);
}

/// The calls of one task go one way; calls without one are drawn for, each anew.
#[tokio::test(start_paused = true)]
async fn a_task_goes_one_way_and_calls_without_one_are_drawn_for() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    for key in 0..50 {
        let first = refused(&service, key).await;
        for _ in 0..5 {
            assert_eq!(refused(&service, key).await, first);
        }
        // By its affinity, whatever its id.
        let mut turn = request(key);
        turn.extensions_mut().insert(Task::new("another turn").affinity(key));
        assert_eq!(service.clone().oneshot(turn).await.is_err(), first.is_some());
    }
    let mut through = 0;
    for _ in 0..2000 {
        let call = http::Request::new(String::new());
        through += u32::from(service.clone().oneshot(call).await.is_ok());
    }
    assert!((60..140).contains(&through), "5 %: {through}");
}

/// A scope ramps alone, and where both recover a task has to be back at both.
#[tokio::test(start_paused = true)]
async fn a_scope_and_its_provider() {
    let steps = Steps::default();
    let provider = wide(&Fleet::local().observer(steps.clone()), "p");
    let model = provider.scope("model");
    let (all, one) =
        (ramped(&provider, Script::always(answer(200))), ramped(&model, Script::always(answer(200))));
    let other = ramped(&provider.scope("other"), Script::always(answer(200)));
    model.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let through = readmitted(&one, 0..1000).await;
    assert!((30..80).contains(&through.len()));
    assert_eq!(
        (readmitted(&all, 0..1000).await.len(), readmitted(&other, 0..1000).await.len()),
        (1000, 1000)
    );
    assert_eq!((provider.readmitted(), model.readmitted()), (1.0, 0.05));
    assert_eq!(*steps.heard.lock().unwrap(), [(Some("model".to_owned()), 0.05)]);

    provider.pause_for(secs(600));
    model.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let (at_all, at_one) = (readmitted(&all, 0..2000).await, readmitted(&one, 0..2000).await);
    assert!(at_one.len() < at_all.len() / 4, "{} and {}", at_one.len(), at_all.len());
    assert!(at_one.iter().all(|key| at_all.contains(key)));
    assert!((model.readmitted() - 0.0025).abs() < 1e-9);
    tokio::time::sleep(secs(10)).await;
    assert!((model.readmitted() - 0.04).abs() < 1e-9);
}

// ---------------------------------------------------------------------------------------------- throttles

/// Throttled on the way: one step back, and not for one stray reply.
#[tokio::test(start_paused = true)]
async fn throttles_take_it_one_step_back_and_a_stray_one_does_not() {
    for (bad, shares) in [(1, [0.05, 0.1, 0.2, 0.4]), (6, [0.05, 0.1, 0.05, 0.05])] {
        let steps = Steps::default();
        let provider = wide(&Fleet::local().observer(steps.clone()), "p");
        let script = Script::new(move |nth, _| match nth {
            // Of those that come in the second step.
            nth if (200..200 + bad).contains(&nth) => answer(429).header("retry-after-ms", 1),
            _ => answer(200),
        });
        let service = ramped(&provider, script.clone());
        provider.pause_for(secs(600));
        tokio::time::sleep(secs(600)).await;
        let back: Vec<u64> = readmitted(&service, 0..100).await;
        let call = |n: usize| {
            let (service, back) = (service.clone(), back.clone());
            async move {
                for i in 0..n {
                    service.clone().oneshot(request(back[i % back.len()])).await.unwrap();
                }
            }
        };
        call(200 - script.calls()).await;
        tokio::time::sleep(secs(5)).await;
        call(100).await;
        for _ in 0..2 {
            tokio::time::sleep(secs(5)).await;
            call(1).await;
        }
        let heard = steps.shares();
        // The throttled have to wait for a few milliseconds in all.
        let alike = |(heard, share): (&f64, f64)| (heard / share - 1.0).abs() < 0.01;
        assert!(heard.iter().zip(shares).all(alike), "{bad} throttled: {heard:?}");
    }
}

/// Each step is told once, not each call; the last one says that all are back. Afterwards nothing is left.
#[tokio::test(start_paused = true)]
async fn an_event_a_step() {
    let steps = Steps::default();
    let provider = wide(&Fleet::local().observer(steps.clone()), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    for _ in 0..60 {
        readmitted(&service, 0..50).await;
        tokio::time::sleep(ms(500)).await;
    }
    assert_eq!(steps.shares(), [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]);
    assert_eq!(provider.readmitted(), 1.0);
}

// ------------------------------------------------------------------------------------ options, and refusals

#[tokio::test(start_paused = true)]
async fn a_profile_is_the_providers() {
    let fleet = Fleet::local();
    let provider = wide(&fleet, "p");
    let line = Profile::slow_start(secs(100));
    let layer = RampedReadmissionLayer::new(&provider).profile(line).unwrap();
    assert!(RampedReadmissionLayer::new(&provider).profile(line).is_ok(), "the same again");
    // The scopes' too; and another one cannot be true as well.
    let error =
        RampedReadmissionLayer::new(&provider.scope("model")).profile(Profile::default()).unwrap_err();
    assert_eq!((error.field, &*error.provider), ("ramp", "p"));
    let wrong = RampedReadmissionLayer::new(&fleet.provider("q"))
        .profile(Profile::geometric(0.0, 2.0, secs(5)))
        .unwrap_err();
    assert_eq!((wrong.field, &*wrong.provider), ("ramp.initial", "q"));
    // It is what is gone by, also by a layer that was given none.
    for service in [
        Boxed::new(layer.layer(rung(&provider, Script::always(answer(200))))),
        ramped(&provider, Script::always(answer(200))),
    ] {
        provider.pause_for(secs(600));
        tokio::time::sleep(secs(600)).await;
        assert!((70..140).contains(&readmitted(&service, 0..1000).await.len()), "10 %");
        tokio::time::sleep(secs(50)).await;
        assert!((450..550).contains(&readmitted(&service, 0..1000).await.len()), "50 %");
        tokio::time::sleep(secs(50)).await;
        assert_eq!(readmitted(&service, 0..1000).await.len(), 1000);
    }
}

#[tokio::test(start_paused = true)]
async fn observed_it_counts_and_off_it_is_not_there() {
    let steps = Steps::default();
    let provider = wide(&Fleet::local().observer(steps.clone()), "p");
    let switch = Switch::new(Mode::Observe);
    let layer = RampedReadmissionLayer::new(&provider).switch(&switch);
    layer.handle().set(Mode::Off);
    layer.handle().set(Mode::Observe);
    let service = Boxed::new(layer.layer(rung(&provider, Script::always(answer(200)))));
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    assert_eq!(readmitted(&service, 0..1000).await.len(), 1000);
    let (would, share) = (switch.would_refuse(), provider.readmitted());
    assert!((920..970).contains(&would), "{would}");
    assert_eq!((steps.would_refuse.load(Ordering::Relaxed), share), (would, 0.05));
    switch.set(Mode::Off);
    assert_eq!(readmitted(&service, 0..1000).await.len(), 1000);
    assert_eq!(switch.would_refuse(), would);
    switch.set(Mode::Enforce);
    assert!(readmitted(&service, 0..1000).await.len() < 80);
    // A second layer of the provider goes by the same switch.
    assert_eq!(RampedReadmissionLayer::new(&provider).handle().would_refuse(), would);
}

/// A sole provider: who is not back waits in the retry layer, free of charge, for exactly as long.
#[tokio::test(start_paused = true)]
async fn the_retry_layer_waits_for_it_free_of_charge() {
    let provider = wide(&Fleet::local(), "p");
    let script = Script::always(answer(200));
    let bare = ramped(&provider, script.clone());
    let service = Boxed::new(
        ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new().budget(Unlimited).seed(1))
            .service(bare.clone()),
    );
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let (key, at) = late_key(&bare, 10).await;
    let before = script.calls();
    let waiting = request(key);
    let task = waiting.extensions().get::<Task>().unwrap().clone();
    assert_eq!(service.clone().oneshot(waiting).await.unwrap().status(), 200);
    let came = script.seen.lock().unwrap().last().unwrap().0;
    // Never early; the jitter on top of it is the retry layer's.
    assert!(came >= at && came < at + secs(12), "{:?} after", came - at);
    assert_eq!((script.calls() - before, task.spent(), task.redelivered()), (1, 0, 0));
    // What does not fit the deadline is told at once, with that instant.
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let (key, at) = late_key(&bare, 10).await;
    let error = service.oneshot(until(key, secs(5))).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::NotReadmitted, Some(at)));
}

// ---------------------------------------------------------------------------------------------- the ladder

struct Two {
    providers: [Provider; 2],
    scripts: [Script; 2],
    service: Boxed,
}

/// Two tiers of one rung each; the second has this many slots. Calls take a second.
fn two(fleet: &Fleet, slots: u32) -> Two {
    let providers =
        [wide(fleet, "one"), fleet.configure("two", ProviderSettings::new().ceiling(slots)).unwrap()];
    let scripts = [(); 2].map(|()| Script::always(answer(200).after(secs(1))));
    let rungs = [
        Rung::new(&providers[0], ramped(&providers[0], scripts[0].clone())),
        Rung::new(&providers[1], ramped(&providers[1], scripts[1].clone())).tier(1),
    ];
    let service = Boxed::new(HashedFailover::new(rungs).unwrap());
    Two { providers, scripts, service }
}

/// Which request went to which script: the ids of its tasks.
fn ids(script: &Script, keys: u64) -> Vec<u64> {
    let seen = script.seen.lock().unwrap();
    let tasks: Vec<Task> = seen.iter().filter_map(|(_, task, _)| task.clone()).collect();
    (0..keys).filter(|key| tasks.iter().any(|task| task.id() == (*key).into())).collect()
}

/// Who is not back goes down the ladder, and neither takes a slot of its own rung nor a place in its queue.
#[tokio::test(start_paused = true)]
async fn who_is_not_back_goes_on_into_free_slots() {
    let two = two(&Fleet::local(), 100_000);
    let bare = ramped(&two.providers[0], Script::always(answer(200)));
    two.providers[0].pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let back = readmitted(&bare, 0..400).await;
    let calls: Vec<_> = (0..400).map(|key| tokio::spawn(two.service.clone().oneshot(request(key)))).collect();
    tokio::time::sleep(ms(100)).await;
    assert_eq!(two.providers[0].in_flight() as usize, back.len());
    assert_eq!(two.providers[0].waiting(), 0);
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
    let first = ids(&two.scripts[0], 400);
    assert!(back.iter().all(|key| first.contains(key)), "who is back, is back");
    // The others waited no longer than their patience for the first, so hardly any was reached by its ramp.
    assert!(first.len() < back.len() + 40 && two.scripts[1].calls() == 400 - first.len());
}

/// No room below: they wait in the ladder's queue, and go to their own rung when the ramp reaches them.
#[tokio::test(start_paused = true)]
async fn who_finds_no_room_below_goes_home_when_the_ramp_reaches_it() {
    let two = two(&Fleet::local(), 2);
    let bare = ramped(&two.providers[0], Script::always(answer(200)));
    two.providers[0].pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let start = Instant::now();
    let mut due = vec![];
    for key in 0..200 {
        due.push(refused(&bare, key).await.and_then(|refusal| refusal.retry_at).unwrap_or(start));
    }
    let calls: Vec<_> = (0..200).map(|key| tokio::spawn(two.service.clone().oneshot(request(key)))).collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
    let seen = two.scripts[0].seen.lock().unwrap().clone();
    for (came, task, _) in &seen {
        let key = (0..200).find(|key| task.as_ref().unwrap().id() == (*key).into()).unwrap();
        let at = due[key as usize];
        assert!(*came >= at && *came <= at + ms(2), "{key}: {:?} late", came.saturating_duration_since(at));
    }
    // Two a second went down meanwhile.
    let below = two.scripts[1].calls();
    assert!((20..=44).contains(&below) && seen.len() + below == 200, "{below}");
    assert!(start.elapsed() <= ms(22_700), "{:?}", start.elapsed());
    assert!(two.scripts[1].peak.load(Ordering::SeqCst) <= 2);
}

/// A ladder of one, and a deadline before the ramp reaches the task: told at once, with the instant.
#[tokio::test(start_paused = true)]
async fn a_ladder_says_when_it_would_be_back() {
    let provider = wide(&Fleet::local(), "p");
    let bare = ramped(&provider, Script::always(answer(200)));
    let ladder = HashedFailover::new([Rung::new(&provider, bare.clone())]).unwrap();
    provider.pause_for(secs(600));
    tokio::time::sleep(secs(600)).await;
    let (key, at) = late_key(&bare, 10).await;
    let start = Instant::now();
    let error = ladder.clone().oneshot(until(key, secs(5))).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!((refusal.kind, refusal.retry_at), (RefusalKind::NoRung, Some(at)));
    assert_eq!(start.elapsed(), Duration::ZERO);
    // With the time for it, it waits.
    ladder.oneshot(until(key, secs(60))).await.unwrap();
    assert!(Instant::now() >= at && Instant::now() < at + ms(2));
}

/// A ladder asks only for what has the layer, and goes by its switch.
#[tokio::test(start_paused = true)]
async fn a_ladder_without_the_layer_or_with_it_switched_off_sends_all() {
    let provider = wide(&Fleet::local(), "p");
    let script = Script::always(answer(200));
    let without = HashedFailover::new([Rung::new(&provider, rung(&provider, script.clone()))]).unwrap();
    let pause = async || {
        provider.pause_for(secs(600));
        tokio::time::sleep(secs(600)).await;
    };
    let quick = async |service: &Boxed| {
        let start = Instant::now();
        let calls: Vec<_> = (0..300).map(|key| tokio::spawn(service.clone().oneshot(request(key)))).collect();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        start.elapsed() < secs(3)
    };
    pause().await;
    assert!(quick(&Boxed::new(without)).await, "no layer");
    let switch = Switch::default();
    let layer = RampedReadmissionLayer::new(&provider).switch(&switch);
    let with = HashedFailover::new([Rung::new(&provider, layer.layer(rung(&provider, script)))]).unwrap();
    let with = Boxed::new(with);
    for (mode, all_at_once) in [(Mode::Off, true), (Mode::Observe, true), (Mode::Enforce, false)] {
        switch.set(mode);
        pause().await;
        assert_eq!(quick(&with).await, all_at_once, "{mode:?}");
    }
}

// -------------------------------------------------------------------------------------------------- cases

// gajae-code#2444, openclaw/openclaw#90717: the advertised reset is days away, capacity is back in minutes. The
// probe goes through whatever its key, and then not everybody comes at once.
#[tokio::test(start_paused = true)]
async fn gajae_2444_openclaw_90717_the_probe_passes_the_ramp_and_the_others_come_by_and_by() {
    for ladder in [false, true] {
        for key in 0..20 {
            let start = Instant::now();
            let provider = wide(&Fleet::local(), "p");
            let script = Script::new(move |_, _| match start.elapsed() < secs(600) {
                true => answer(429).header("retry-after", 2 * 24 * 3600),
                false => answer(200),
            });
            let mut service = ramped(&provider, script.clone());
            if ladder {
                service = Boxed::new(HashedFailover::new([Rung::new(&provider, service)]).unwrap());
            }
            service.clone().oneshot(request(0)).await.unwrap();
            // One sole task asks, whose turn it may not be for long.
            while service.clone().oneshot(until(key, secs(5))).await.is_err() {
                tokio::time::sleep(secs(10)).await;
                assert!(start.elapsed() < secs(10_000));
            }
            assert!(start.elapsed() < secs(4400), "ladder {ladder}, {key}: {:?}", start.elapsed());
            assert_eq!(script.calls(), 2, "one probe");
            let mut through = 0;
            for key in 0..200 {
                through += u32::from(service.clone().oneshot(until(key, Duration::ZERO)).await.is_ok());
            }
            assert!((1..30).contains(&through), "ladder {ladder}: {through}");
        }
    }
}

// The same for those who wait: in the retry layer, with nobody who comes anew.
#[tokio::test(start_paused = true)]
async fn gajae_2444_who_waits_in_the_retry_layer_probes_too() {
    for scoped in [false, true] {
        let start = Instant::now();
        let script = Script::new(move |_, _| match start.elapsed() < secs(600) {
            true => answer(429).header("retry-after", 2 * 24 * 3600),
            false => answer(200),
        });
        let provider = wide(&Fleet::local(), "p");
        let at = if scoped { provider.scope("model") } else { provider };
        let bare = ramped(&at, script.clone());
        let service = retrying(bare.clone());
        bare.clone().oneshot(request(0)).await.unwrap();
        let waiting: Vec<_> =
            (1..20).map(|i| tokio::spawn(service.clone().oneshot(until(i, secs(100_000))))).collect();
        let mut ends = vec![];
        for waiter in waiting {
            assert_eq!(waiter.await.unwrap().unwrap().status(), 200);
            ends.push(start.elapsed());
        }
        // A day is the longest pause that is held; the probe comes after a twentieth of it.
        assert!(ends[18] < secs(4700), "scoped {scoped}: {ends:?}");
        assert_eq!(script.calls(), 20);
    }
}

// KarpelesLab/teamclaude#84 to #309: all jumped over together, and would all jump back together. Here thirty come
// home one by one, each once, and none is sent to and fro.
#[tokio::test(start_paused = true)]
async fn teamclaude_84_309_thirty_come_home_one_by_one() {
    let two = two(&Fleet::local(), 100);
    // All at once, again and again; who went to the first rung.
    let round = async || {
        let before = two.scripts.each_ref().map(Script::calls);
        let calls: Vec<_> =
            (0..30).map(|key| tokio::spawn(two.service.clone().oneshot(request(key)))).collect();
        for call in calls {
            assert_eq!(call.await.unwrap().unwrap().status(), 200);
        }
        let seen = two.scripts[0].seen.lock().unwrap()[before[0]..].to_vec();
        assert_eq!(seen.len() + two.scripts[1].calls() - before[1], 30);
        seen.into_iter().map(|(at, task, _)| (task.unwrap().id(), at)).collect::<Vec<_>>()
    };
    two.providers[0].pause_for(secs(301));
    assert_eq!(round().await, [], "all jumped over");
    tokio::time::sleep(secs(300)).await;
    let start = Instant::now();
    let mut homes = std::collections::BTreeMap::new();
    while homes.len() < 30 {
        let now = round().await;
        let at_home = |key| now.iter().any(|(id, _)| id == key);
        assert!(homes.keys().all(at_home), "nobody is sent away again");
        for (key, at) in now {
            homes.entry(key).or_insert(at);
        }
    }
    assert!((secs(15)..secs(24)).contains(&start.elapsed()), "{:?}", start.elapsed());
    // No two at the same instant, but for those of the first twentieth.
    let mut homes: Vec<u128> = homes.into_values().map(|at| (at - start).as_millis()).collect();
    homes.sort_unstable();
    let later = homes.iter().skip_while(|at| **at < 5);
    assert!(later.clone().count() > 20 && later.clone().zip(later.skip(1)).all(|(a, b)| b > a), "{homes:?}");
    // Never more than the ramp lets in, and two by chance.
    for (n, at) in homes.iter().enumerate() {
        let share = 0.05 * 2f64.powf(*at as f64 / 5000.0);
        assert!((n as f64) < 30.0 * share + 6.0, "{homes:?}");
    }
}

// gabrielkoerich/orch#329: all who were penalised recovered on the same tick. Each has an instant of its own
// here, spread as the share grows, and none before the end of the pause.
#[tokio::test(start_paused = true)]
async fn orch_329_each_of_a_thousand_recovers_at_its_own_instant() {
    let provider = wide(&Fleet::local(), "p");
    let service = ramped(&provider, Script::always(answer(200)));
    provider.pause_for(secs(301));
    let ends = Instant::now() + secs(301);
    tokio::time::sleep(secs(290)).await;
    let mut instants = vec![];
    for key in 0..1000 {
        match service.clone().oneshot(until(key, Duration::ZERO)).await {
            Ok(_) => panic!("it is paused"),
            Err(error) => instants.push(Refusal::find(&*error).unwrap().retry_at.unwrap()),
        }
    }
    instants.sort_unstable();
    assert!(instants[0] >= ends && instants[999] <= ends + ms(21_610));
    let later = &instants[instants.partition_point(|at| *at == ends)..];
    assert!(later.len() > 920, "but for the first twentieth: {}", later.len());
    assert!(later.windows(2).all(|two| two[1] > two[0]), "no two at the same instant");
    // The fullest tenth of a second is that before the end, where a whole step takes 2.2 s of the last half.
    let fullest = (0..217)
        .map(|tenth| {
            let from = ends + ms(100) * tenth;
            later.iter().filter(|at| (from..from + ms(100)).contains(at)).count()
        })
        .max();
    assert!(fullest < Some(35), "{fullest:?}");
}
