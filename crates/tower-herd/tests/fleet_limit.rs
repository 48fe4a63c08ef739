//! The ceiling, as callers see it.

mod common;

use common::{Script, answer, ms, request, secs};
use http_body_util::BodyExt as _;
use std::time::Duration;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tower_herd::{
    Criticality, Fleet, FleetLimitLayer, Provider, ProviderSettings, Refusal, RefusalKind, Task,
};

fn provider(ceiling: u32) -> Provider {
    Fleet::local().configure("p", ProviderSettings::new().ceiling(ceiling).aborts(true)).unwrap()
}

#[tokio::test(start_paused = true)]
async fn never_more_in_flight_than_the_ceiling_however_many_services() {
    let provider = provider(5);
    let script = Script::always(answer(200).after(ms(100)));
    // tokio-rs/axum#2582: a limit made for each `layer()` let 12 through a limit of 2.
    let calls: Vec<_> = (0..100)
        .map(|i| {
            let service = FleetLimitLayer::new(&provider).layer(script.clone());
            tokio::spawn(async move { service.oneshot(request(i)).await.unwrap().collect().await.unwrap() })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(script.peak.load(std::sync::atomic::Ordering::SeqCst), 5);
    assert_eq!((script.calls(), provider.in_flight(), provider.waiting()), (100, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn first_come_first_served() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(ms(10)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let calls: Vec<_> = (0..20).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let seen: Vec<u64> =
        script.seen.lock().unwrap().iter().map(|s| s.1.as_ref().unwrap().id().get()).collect();
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
}

// e2b-dev/E2B#1666, conjure#1255: freed at the head while the stream still runs, or held too long.
#[tokio::test(start_paused = true)]
async fn a_slot_lives_until_the_body_ends_or_until_the_reply() {
    let provider = provider(1);
    let script = Script::always(answer(200).body("hello"));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let reply = service.clone().oneshot(request(1)).await.unwrap();
    assert_eq!(provider.in_flight(), 1);
    reply.into_body().collect().await.unwrap();
    assert_eq!(provider.in_flight(), 0);
    let reply = service.oneshot(request(1)).await.unwrap();
    assert_eq!(provider.in_flight(), 1);
    drop(reply);
    assert_eq!(provider.in_flight(), 0, "a body that is dropped ends it too");
    let reply =
        FleetLimitLayer::new(&provider).until_reply().layer(script).oneshot(request(1)).await.unwrap();
    assert_eq!(provider.in_flight(), 0);
    drop(reply);
}

// PrefectHQ/prefect#20251: a slot was held while its owner waited for a retry.
#[tokio::test(start_paused = true)]
async fn an_error_reply_gives_its_slot_back_at_its_head() {
    for status in [429, 500, 404] {
        let provider = provider(1);
        let script = Script::always(answer(status).body("no"));
        let reply = FleetLimitLayer::new(&provider).layer(script).oneshot(request(1)).await.unwrap();
        assert_eq!(provider.in_flight(), 0, "{status}");
        drop(reply);
    }
}

// BerriAI/litellm#20256, #28160: a slot was not given back on timeout, cancel or error.
#[tokio::test(start_paused = true)]
async fn every_way_out_gives_the_slot_back() {
    let provider = provider(2);
    let script = Script::always(answer(200).after(secs(5)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    // never polled
    drop(service.clone().oneshot(request(0)));
    let mut ready = service.clone();
    drop(ready.ready().await.unwrap().call(request(0)));
    assert_eq!(provider.in_flight(), 0);
    // dropped in flight, in the queue, and just when the slot was granted
    for millis in [0, 1, 4999, 5000, 5001] {
        let calls: Vec<_> = (0..4)
            .map(|i| tokio::spawn(tokio::time::timeout(ms(millis), service.clone().oneshot(request(i)))))
            .collect();
        for call in calls {
            drop(call.await.unwrap());
        }
        assert_eq!((provider.in_flight(), provider.waiting()), (0, 0), "{millis} ms");
    }
    // the inner service fails, or panics
    let fails = tower::service_fn(|_: common::Request| async {
        Err::<common::Response, _>(std::io::Error::other("x"))
    });
    FleetLimitLayer::new(&provider).layer(fails).oneshot(request(0)).await.unwrap_err();
    let panics = tower::service_fn(|_: common::Request| async {
        tokio::task::yield_now().await;
        if true {
            panic!("on purpose");
        }
        Ok::<_, std::io::Error>(common::Response::default())
    });
    let call = tokio::spawn(FleetLimitLayer::new(&provider).layer(panics).oneshot(request(0)));
    assert!(call.await.unwrap_err().is_panic());
    assert_eq!((provider.in_flight(), provider.waiting()), (0, 0));
}

// Or a provider that nobody calls any more would look busy for ever.
#[tokio::test(start_paused = true)]
async fn a_slot_that_has_lingered_out_counts_as_free_though_nobody_came_for_it() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    let script = Script::always(answer(200).body("x").after(ms(400)));
    let service = FleetLimitLayer::new(&provider).layer(script);
    let dropped = tokio::time::timeout(ms(100), service.oneshot(request(1))).await;
    assert!(dropped.is_err() && provider.in_flight() == 1);
    tokio::time::sleep(secs(11)).await;
    assert_eq!(provider.in_flight(), 0);
}

// Law 2: a call dropped after it was sent may still run there.
#[tokio::test(start_paused = true)]
async fn the_slot_of_a_dropped_call_lingers_unless_the_provider_is_known_to_abort() {
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    let script = Script::always(answer(200).body("x").after(ms(400)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    for i in 0..20 {
        service.clone().oneshot(request(i)).await.unwrap().collect().await.unwrap();
    }
    let start = Instant::now();
    tokio::time::timeout(ms(100), service.clone().oneshot(request(1))).await.ok();
    assert_eq!(provider.in_flight(), 1);
    service.clone().oneshot(request(2)).await.unwrap().collect().await.unwrap();
    let began = *script.times(start).last().unwrap();
    assert!((500..620).contains(&began), "the 95th percentile of durations after the drop: {began}");
    // a place in the queue leaves nothing behind
    let held = service.clone().oneshot(request(3)).await.unwrap();
    tokio::time::timeout(ms(100), service.clone().oneshot(request(4))).await.ok();
    held.collect().await.unwrap();
    assert_eq!(provider.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_bounded_and_refused_at_entry_where_it_cannot_fit() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(secs(10)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    service.clone().oneshot(request(0)).await.unwrap().collect().await.unwrap();
    let running = tokio::spawn(service.clone().oneshot(request(1)));
    tokio::task::yield_now().await;
    let start = Instant::now();
    let mut late = request(2);
    late.extensions_mut().insert(Task::new(2).deadline_in(secs(2)));
    let error = service.clone().oneshot(late).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap().clone();
    assert_eq!((refusal.kind, Instant::now()), (RefusalKind::NoSlot, start), "known at once");
    assert!(refusal.retry_at.unwrap() > start + secs(2));
    let impatient = FleetLimitLayer::new(&provider).patience(Duration::ZERO).layer(script);
    let error = impatient.oneshot(request(3)).await.unwrap_err();
    assert_eq!((Refusal::find(&*error).unwrap().kind, Instant::now()), (RefusalKind::NoSlot, start));
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded() {
    let settings = ProviderSettings::new().ceiling(1).queue(3).aborts(true);
    let provider = Fleet::local().configure("p", settings).unwrap();
    let service = FleetLimitLayer::new(&provider).layer(Script::always(answer(200).after(secs(1))));
    let calls: Vec<_> = (0..6).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    let mut outcomes = vec![];
    for call in calls {
        outcomes.push(call.await.unwrap().map_err(|e| Refusal::find(&*e).unwrap().why).err());
    }
    assert_eq!(outcomes.iter().filter(|o| **o == Some("its queue is full")).count(), 2, "{outcomes:?}");
}

// BerriAI/litellm#31830, mostlygeek/llama-swap#811: batch work starves people; and may not starve itself.
#[tokio::test(start_paused = true)]
async fn interactive_first_batch_never_starved_and_callers_take_turns() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(ms(100)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let spawn = |id: u64, caller: &str, criticality| {
        let mut request = request(id);
        let task = Task::new(id).deadline_in(secs(600)).caller(caller).criticality(criticality);
        request.extensions_mut().insert(task);
        let service = service.clone();
        tokio::spawn(async move { service.oneshot(request).await.unwrap().collect().await.unwrap() })
    };
    let mut calls = vec![spawn(0, "first", Criticality::Interactive)];
    tokio::time::sleep(ms(1)).await;
    for i in 0..100 {
        calls.push(spawn(1000 + i, "batch", Criticality::Batch));
    }
    for i in 0..100 {
        calls.push(spawn(2000 + i, "greedy", Criticality::Interactive));
    }
    tokio::time::sleep(ms(1)).await;
    calls.push(spawn(3000, "modest", Criticality::Interactive));
    for call in calls {
        call.await.unwrap();
    }
    let order: Vec<u64> =
        script.seen.lock().unwrap().iter().map(|s| s.1.as_ref().unwrap().id().get()).collect();
    let place = |id| order.iter().position(|seen| *seen == id).unwrap();
    assert!(place(3000) <= 4, "one call of a caller does not wait for a hundred of another: {}", place(3000));
    assert!((48..=56).contains(&place(1000)), "batch takes turns after 5 s: {}", place(1000));
    assert!(place(1010) > place(2040));
}

#[tokio::test(start_paused = true)]
async fn settings_that_cannot_be_or_that_differ_are_errors() {
    let fleet = Fleet::local();
    for (settings, field) in [
        (ProviderSettings::new().ceiling(0), "ceiling"),
        (ProviderSettings::new().floor(0), "floor"),
        (ProviderSettings::new().ceiling(3).floor(5), "ceiling"),
        (ProviderSettings::new().start(2).floor(5), "start"),
        (ProviderSettings::new().ceiling(u32::MAX), "ceiling"),
        (ProviderSettings::new().requests_per_minute(0), "requests_per_minute"),
    ] {
        let error = fleet.configure("bad", settings.clone()).unwrap_err();
        assert_eq!((error.field, &*error.provider), (field, "bad"), "{settings:?}");
        assert!(error.to_string().contains(field));
    }
    fleet.configure("known", ProviderSettings::new().ceiling(30).floor(20)).unwrap();
    fleet.configure("good", ProviderSettings::new().ceiling(7)).unwrap();
    assert_eq!(fleet.configure("good", ProviderSettings::new().ceiling(7)).unwrap().ceiling(), 7);
    assert_eq!(fleet.configure("good", ProviderSettings::new().ceiling(8)).unwrap_err().field, "all");
}

#[tokio::test(start_paused = true)]
async fn requests_a_minute_are_paced() {
    let settings = ProviderSettings::new().ceiling(100).requests_per_minute(60).aborts(true);
    let provider = Fleet::local().configure("p", settings).unwrap();
    let script = Script::always(answer(200));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    let start = Instant::now();
    let calls: Vec<_> = (0..30).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let times = script.times(start);
    for (i, pair) in times.windows(10).enumerate() {
        assert!(pair[9] - pair[0] >= 7500, "10 calls from the {i}th on take 9 s, less a burst: {times:?}");
    }
}

// An estimate that guesses low would send callers away whom a ceiling that is being discovered serves.
#[tokio::test(start_paused = true)]
async fn nobody_is_sent_away_while_the_ceiling_is_still_being_discovered() {
    let provider = Fleet::local().provider("p");
    let script = Script::always(answer(200).after(secs(1)));
    let service = FleetLimitLayer::new(&provider).layer(script.clone());
    service.clone().oneshot(request(0)).await.unwrap().collect().await.unwrap();
    let calls: Vec<_> = (0..1000)
        .map(|i| {
            let mut request = request(i);
            request.extensions_mut().insert(Task::new(i).deadline_in(secs(30)));
            tokio::spawn(service.clone().oneshot(request))
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
}

// Law 2: after a timeout of ours the call may still run there, whether its head had come or not.
#[tokio::test(start_paused = true)]
async fn a_body_that_is_given_up_leaves_its_slot_lingering() {
    type Frames = futures_util::stream::Pending<Result<http_body::Frame<bytes::Bytes>, std::io::Error>>;
    let provider = Fleet::local().configure("p", ProviderSettings::new().ceiling(1)).unwrap();
    let layers = tower::ServiceBuilder::new()
        .layer(FleetLimitLayer::new(&provider))
        .layer(tower_herd::AttemptTimeoutLayer::new(secs(1)).idle(secs(2)));
    let service = layers.service_fn(|_: common::Request| async {
        let body = http_body_util::StreamBody::new(Frames::clone(&futures_util::stream::pending()));
        Ok::<_, std::io::Error>(http::Response::new(body))
    });
    let reply = service.oneshot(request(1)).await.unwrap();
    assert!(reply.into_body().collect().await.is_err());
    assert_eq!(provider.in_flight(), 1);
    tokio::time::sleep(secs(10)).await;
    assert_eq!(provider.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn floor_and_start_bound_what_is_learned() {
    for (settings, at_first, lowest) in [
        (ProviderSettings::new(), 10, 1..3),
        (ProviderSettings::new().start(16), 16, 1..3),
        (ProviderSettings::new().start(16).floor(6), 16, 6..8),
    ] {
        let provider = Fleet::local().configure("p", settings).unwrap();
        assert_eq!(provider.ceiling(), at_first);
        let service = FleetLimitLayer::new(&provider).layer(Script::always(answer(529)));
        let (mut least, task) = (at_first, Task::new(1).deadline_in(secs(100_000)));
        for i in 0..60 {
            let mut request = request(i);
            request.extensions_mut().insert(task.clone());
            service.clone().oneshot(request).await.unwrap();
            least = least.min(provider.ceiling());
            tokio::time::sleep(secs(60)).await;
        }
        assert!(lowest.contains(&least), "however often it is overloaded: {least}");
    }
}

#[tokio::test(start_paused = true)]
async fn how_old_a_batch_call_gets_before_its_turn_is_a_setting() {
    // A slot for a second at a time, people always in line: after its age the batch call takes turns with them.
    for (age, expected) in [(2, 3), (5, 6), (9, 10)] {
        let settings = ProviderSettings::new().ceiling(1).aborts(true).batch_age(secs(age));
        let provider = Fleet::local().configure("p", settings).unwrap();
        let script = Script::always(answer(200).after(secs(1)));
        let service = FleetLimitLayer::new(&provider).until_reply().layer(script.clone());
        let spawn = |id: u64, class| {
            let mut request = request(id);
            request.extensions_mut().insert(Task::new(id).deadline_in(secs(600)).criticality(class));
            tokio::spawn(service.clone().oneshot(request))
        };
        let mut calls = vec![spawn(0, Criticality::Interactive)];
        tokio::time::sleep(ms(1)).await;
        calls.push(spawn(1, Criticality::Batch));
        calls.extend((2..20).map(|id| spawn(id, Criticality::Interactive)));
        for call in calls {
            call.await.unwrap().unwrap();
        }
        let seen = script.seen.lock().unwrap();
        let place = seen.iter().position(|(_, task, _)| task.as_ref().unwrap().id() == 1.into()).unwrap();
        assert!(place.abs_diff(expected) <= 1, "{age} s: {place}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_operator_changes_the_limit_while_calls_wait() {
    let provider = provider(1);
    let script = Script::always(answer(200).after(secs(10)));
    let service = FleetLimitLayer::new(&provider).until_reply().layer(script.clone());
    let calls: Vec<_> = (0..6).map(|i| tokio::spawn(service.clone().oneshot(request(i)))).collect();
    tokio::time::sleep(secs(1)).await;
    assert_eq!((provider.in_flight(), provider.waiting()), (1, 5));
    let settings = |ceiling| ProviderSettings::new().ceiling(ceiling).aborts(true);
    assert_eq!(provider.reconfigure(settings(0)).unwrap_err().field, "ceiling");
    assert_eq!(provider.ceiling(), 1, "nothing has changed");
    provider.reconfigure(settings(4)).unwrap();
    tokio::time::sleep(secs(1)).await;
    assert_eq!((provider.ceiling(), provider.in_flight(), provider.waiting()), (4, 4, 2));
    // Below what is in flight: nobody is cut off, and nobody comes in before enough have ended.
    provider.reconfigure(settings(2)).unwrap();
    tokio::time::sleep(secs(1)).await;
    assert_eq!((provider.in_flight(), provider.waiting()), (4, 2));
    tokio::time::sleep(ms(7500)).await;
    assert_eq!((provider.in_flight(), provider.waiting()), (3, 2), "the first has ended");
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(script.peak.load(std::sync::atomic::Ordering::SeqCst), 4);
}
