//! The provider, which counts for itself, and never asks a process what it believes to have in flight.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, sleep},
};

/// One call, from when its request was read until its work was over.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) worker: Arc<str>,
    pub(crate) began: Instant,
    pub(crate) ended: Option<Instant>,
    /// It was answered with a 429.
    pub(crate) throttled: bool,
}

#[derive(Debug, Default)]
struct Book {
    calls: Vec<Call>,
    /// It works on at the calls of who has hung up.
    works_on: bool,
    /// The next call of this worker is answered with a 429 and this Retry-After.
    throttle: Option<(String, u64)>,
}

/// A provider on a thread of its own: a busy test does not make it count late.
#[derive(Debug)]
pub(crate) struct Judge {
    book: Arc<Mutex<Book>>,
    port: u16,
    /// It lives as long as this.
    _end: watch::Sender<()>,
}

fn lock(book: &Mutex<Book>) -> std::sync::MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Judge {
    pub(crate) fn start() -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let book = Arc::new(Mutex::new(Book::default()));
        let (end, ended) = watch::channel(());
        let shared = book.clone();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(serve(listener, shared, ended));
        });
        Judge { book, port, _end: end }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Whether it works on at calls whose caller has hung up. At first it does not.
    pub(crate) fn works_on(&self, so: bool) {
        lock(&self.book).works_on = so;
    }

    /// The next call of this worker is answered with a 429.
    pub(crate) fn throttle(&self, worker: &str, seconds: u64) {
        lock(&self.book).throttle = Some((worker.to_owned(), seconds));
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        lock(&self.book).calls.clone()
    }

    /// In flight now.
    pub(crate) fn now(&self, of: impl Fn(&Call) -> bool) -> usize {
        lock(&self.book).calls.iter().filter(|call| call.ended.is_none() && of(call)).count()
    }

    /// The most of these that were in flight at once, at or after an instant.
    pub(crate) fn most(&self, from: Instant, of: impl Fn(&Call) -> bool) -> usize {
        let changes = self.changes(of);
        let before = changes.iter().take_while(|(at, _)| *at < from).map(|(_, count)| *count).last();
        changes.iter().filter(|(at, _)| *at >= from).map(|(_, count)| *count).chain(before).max().unwrap_or(0)
    }

    /// When so many of these were in flight first, not before an instant.
    pub(crate) fn first(&self, from: Instant, many: usize, of: impl Fn(&Call) -> bool) -> Option<Instant> {
        let changes = self.changes(of);
        let before = changes.iter().take_while(|(at, _)| *at < from).map(|(_, count)| *count).last();
        if before.is_some_and(|count| count >= many) {
            return Some(from);
        }
        changes.iter().find(|(at, count)| *at >= from && *count >= many).map(|(at, _)| *at)
    }

    /// So many of these began from one instant on, and before another.
    pub(crate) fn began(&self, from: Instant, to: Instant, of: impl Fn(&Call) -> bool) -> usize {
        lock(&self.book).calls.iter().filter(|call| call.began >= from && call.began < to && of(call)).count()
    }

    /// How many there were after each change, in order.
    fn changes(&self, of: impl Fn(&Call) -> bool) -> Vec<(Instant, usize)> {
        let mut changes: Vec<(Instant, bool)> = Vec::new();
        for call in self.calls().iter().filter(|call| of(call)) {
            changes.push((call.began, true));
            changes.extend(call.ended.map(|ended| (ended, false)));
        }
        // Of one instant, the end first: the clock was read under the lock, so it was.
        changes.sort();
        let mut count: usize = 0;
        let count = |(at, begins): (Instant, bool)| {
            count = if begins { count + 1 } else { count - 1 };
            (at, count)
        };
        changes.into_iter().map(count).collect()
    }
}

async fn serve(listener: std::net::TcpListener, book: Arc<Mutex<Book>>, mut end: watch::Receiver<()>) {
    let listener = TcpListener::from_std(listener).unwrap();
    loop {
        tokio::select! {
            client = listener.accept() => {
                let Ok((client, _)) = client else { continue };
                tokio::spawn(answer(client, book.clone()));
            }
            _ = end.changed() => return,
        }
    }
}

/// `GET /worker/milliseconds`: works for so long.
async fn answer(client: TcpStream, book: Arc<Mutex<Book>>) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    let mut line = String::new();
    if !from.read_line(&mut line).await.is_ok_and(|read| read > 0) {
        return;
    }
    let path = line.split(' ').nth(1).unwrap_or_default();
    let (worker, hold) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
    let hold = Duration::from_millis(hold.parse().unwrap_or_else(|_| panic!("{line}")));
    let (place, works_on, throttle) = {
        let mut book = lock(&book);
        let throttle = book.throttle.take_if(|(whose, _)| whose == worker);
        let throttled = throttle.is_some();
        book.calls.push(Call { worker: worker.into(), began: Instant::now(), ended: None, throttled });
        (book.calls.len() - 1, book.works_on, throttle)
    };
    let hung_up = async {
        let mut rest = [0; 1024];
        while from.read(&mut rest).await.is_ok_and(|read| read > 0) {}
    };
    if throttle.is_none() {
        tokio::select! {
            () = sleep(hold) => {}
            () = hung_up, if !works_on => {}
        }
    }
    {
        let mut book = lock(&book);
        book.calls[place].ended = Some(Instant::now());
    }
    let head = match throttle {
        Some((_, seconds)) => format!("429 Too Many Requests\r\nretry-after: {seconds}"),
        None => "200 OK".to_owned(),
    };
    let reply = format!("HTTP/1.1 {head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    // Who has hung up does not care.
    to.write_all(reply.as_bytes()).await.ok();
}
