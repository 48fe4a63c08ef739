//! The chain's extensions: there and back, on every way out.

mod common;

use common::{Again, Inspect, chain, server};
use http::Extensions;
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use std::{sync::Arc, time::Duration};
use tower::{
    Service, ServiceBuilder, ServiceExt,
    layer::util::Identity,
    retry::RetryLayer,
    util::{MapRequestLayer, MapResponseLayer},
};
use tower_herd::{Safety, Task, TaskLayer};
use tower_herd_reqwest::{HttpService, TowerMiddleware};

type HttpRequest = http::Request<reqwest::Body>;

#[derive(Clone, Debug, PartialEq)]
struct FromCaller(u8);
#[derive(Clone, Debug, PartialEq)]
struct FromLayer(u8);
#[derive(Clone, Debug, PartialEq)]
struct FromInside(Vec<&'static str>);

/// Notes what it was given, and leaves a trace.
fn inside() -> Arc<dyn Middleware> {
    Arc::new(Inspect(|_: &mut _, extensions: &mut Extensions| {
        let mut trace = extensions.remove::<FromInside>().map_or(vec![], |trace| trace.0);
        trace.extend(extensions.get::<FromCaller>().map(|_| "caller"));
        trace.extend(extensions.get::<FromLayer>().map(|_| "layer"));
        extensions.insert(FromInside(trace));
    }))
}

async fn run(client: &ClientWithMiddleware, url: String, extensions: &mut Extensions) -> bool {
    let request = reqwest::Client::new().get(url).timeout(Duration::from_millis(100)).build().unwrap();
    client.execute_with_extensions(request, extensions).await.is_ok()
}

#[tokio::test]
async fn there_and_back() {
    let server = server().await;
    let layer = MapRequestLayer::new(|mut request: HttpRequest| {
        assert_eq!(request.extensions().get(), Some(&FromCaller(7)), "layers see what the caller gave");
        request.extensions_mut().insert(FromLayer(1));
        request
    });
    let seen = MapResponseLayer::new(|response: http::Response<reqwest::Body>| {
        assert!(response.extensions().get::<FromInside>().is_some(), "and what middlewares left");
        response
    });
    let stack = ServiceBuilder::new().layer(seen).layer(layer).into_inner();
    let client = chain(vec![Arc::new(TowerMiddleware::new(stack)), inside()]);
    // A success, and an error: the request's timeout.
    for (path, ok) in [("/echo", true), ("/slow", false)] {
        let mut extensions = Extensions::new();
        extensions.insert(FromCaller(7));
        assert_eq!(run(&client, server.at(path), &mut extensions).await, ok);
        assert_eq!(extensions.get(), Some(&FromCaller(7)), "{path}");
        assert_eq!(extensions.get(), Some(&FromInside(vec!["caller", "layer"])), "{path}");
    }
}

#[tokio::test]
async fn kept_when_nothing_is_sent_and_when_the_request_is_rebuilt() {
    let server = server().await;
    let url = server.at("/echo");
    let rebuilt = MapRequestLayer::new(move |_| http::Request::get(&url).body(Default::default()).unwrap());
    let client = chain(vec![Arc::new(TowerMiddleware::new(rebuilt)), inside()]);
    let mut extensions = Extensions::new();
    extensions.insert(FromCaller(7));
    assert!(run(&client, "http://placeholder.invalid".into(), &mut extensions).await);
    assert_eq!(extensions.get(), Some(&FromInside(vec!["caller"])));

    let refusing = tower::filter::FilterLayer::new(|_: HttpRequest| Err::<HttpRequest, _>("no"));
    let client = chain(vec![Arc::new(TowerMiddleware::new(refusing)), inside()]);
    let mut extensions = Extensions::new();
    extensions.insert(FromCaller(7));
    assert!(!run(&client, server.at("/echo"), &mut extensions).await);
    assert_eq!(extensions.get(), Some(&FromCaller(7)));
}

#[tokio::test]
async fn kept_when_the_caller_stops_waiting() {
    let server = server().await;
    let client = chain(vec![Arc::new(TowerMiddleware::new(Identity::new())), inside()]);
    let mut extensions = Extensions::new();
    extensions.insert(FromCaller(7));
    let call = run(&client, server.at("/slow"), &mut extensions);
    tokio::time::timeout(Duration::from_millis(30), call).await.unwrap_err();
    assert_eq!(extensions.get(), Some(&FromCaller(7)));
}

#[tokio::test]
async fn an_attempt_finds_what_the_one_before_left() {
    let server = server().await;
    server.counts.flaky.store(2, std::sync::atomic::Ordering::SeqCst);
    let client = chain(vec![Arc::new(TowerMiddleware::new(RetryLayer::new(Again(3)))), inside()]);
    let mut extensions = Extensions::new();
    extensions.insert(FromCaller(7));
    assert!(run(&client, server.at("/flaky"), &mut extensions).await);
    assert_eq!(extensions.get(), Some(&FromInside(vec!["caller"; 3])));
}

/// Whether a middleware was given a task, and which.
struct TaskSeen(Arc<std::sync::Mutex<Vec<Option<Task>>>>);
#[async_trait::async_trait]
impl Middleware for TaskSeen {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        self.0.lock().unwrap().push(extensions.get().cloned());
        next.run(request, extensions).await
    }
}

#[tokio::test]
async fn a_task_that_the_layers_start_goes_in_and_not_out() {
    let server = server().await;
    let tasks: Arc<std::sync::Mutex<Vec<Option<Task>>>> = Arc::default();
    let costly = MapRequestLayer::new(|mut request: HttpRequest| {
        request.extensions_mut().insert(Safety::Costly);
        request
    });
    let stack = ServiceBuilder::new().layer(TaskLayer::new()).layer(costly).into_inner();
    let client = chain(vec![Arc::new(TowerMiddleware::new(stack)), Arc::new(TaskSeen(tasks.clone()))]);
    let mut extensions = Extensions::new();
    for _ in 0..2 {
        assert!(run(&client, server.at("/echo"), &mut extensions).await);
        assert!(extensions.get::<Task>().is_none() && extensions.get::<Safety>().is_none());
    }
    // A task that the caller gave stays his, and is the one inside.
    let mine = Task::new("mine");
    extensions.insert(mine.clone());
    assert!(run(&client, server.at("/echo"), &mut extensions).await);
    assert!(extensions.get::<Task>().is_some_and(|task| task.is(&mine)));

    let tasks = std::mem::take(&mut *tasks.lock().unwrap());
    let tasks: Vec<_> = tasks.into_iter().map(Option::unwrap).collect();
    assert!(!tasks[0].is(&tasks[1]), "two requests are two tasks, even over the same extensions");
    assert!(tasks[2].is(&mine));
}

#[tokio::test]
async fn the_task_of_a_stack_around_the_client_goes_on_inside() {
    let server = server().await;
    let tasks: Arc<std::sync::Mutex<Vec<Option<Task>>>> = Arc::default();
    let stack = || TowerMiddleware::new(TaskLayer::new());
    let client =
        chain(vec![Arc::new(stack()), Arc::new(stack()), Arc::new(TaskSeen(tasks.clone())), inside()]);
    let mine = Task::new("mine");
    let request = || {
        let mut request = http::Request::get(server.at("/echo")).body(Default::default()).unwrap();
        request.extensions_mut().insert(mine.clone());
        request
    };
    let mut service = HttpService::new(client.clone());
    let response = service.ready().await.unwrap().call(request()).await.unwrap();
    assert!(response.extensions().get::<FromInside>().is_some(), "what middlewares leave is on it");
    // The client's own service leaves the chain's extensions empty; the task is in the request then.
    let mut client = client;
    Service::call(&mut client, request().try_into().unwrap()).await.unwrap();
    for task in tasks.lock().unwrap().iter() {
        assert!(task.as_ref().is_some_and(|task| task.is(&mine)));
    }
    assert_eq!(tasks.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn the_timeout_of_one_request_is_not_that_of_the_next() {
    let server = server().await;
    let client = chain(vec![Arc::new(TowerMiddleware::new(Identity::new()))]);
    let mut extensions = Extensions::new();
    assert!(run(&client, server.at("/echo"), &mut extensions).await);
    assert!(extensions.is_empty(), "nothing of reqwest's own: {extensions:?}");
    let request = reqwest::Client::new().get(server.at("/slow")).build().unwrap();
    client.execute_with_extensions(request, &mut extensions).await.unwrap();
}
