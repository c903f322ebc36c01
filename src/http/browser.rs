//! What the headers of a request say about a browser: which page sent it, and which host it was
//! sent to. Pure.
//!
//! A web page can send requests to a port of the local machine. It cannot choose the headers `Host`,
//! `Origin` and `Sec-Fetch-Site`.

use axum::http::header::{HOST, HeaderMap, HeaderValue, ORIGIN};

/// Whether a request was sent to this machine by a name that no other machine can have. A page of
/// an attacker can make a name of its own resolve to this machine (DNS rebinding).
pub fn has_local_host(headers: &HeaderMap) -> bool {
    let host = text(headers.get(HOST)).unwrap_or_default();
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    matches!(name, "" | "localhost" | "127.0.0.1" | "[::1]")
}

/// Whether a page of another origin sent the request.
pub fn is_cross_origin(headers: &HeaderMap) -> bool {
    let site = text(headers.get("sec-fetch-site"));
    if site.is_some_and(|site| !matches!(site, "same-origin" | "none")) {
        return true;
    }
    let Some(origin) = headers.get(ORIGIN) else {
        return false;
    };
    let host = text(headers.get(HOST)).unwrap_or_default();
    let origin = text(Some(origin)).unwrap_or_default();
    let authority = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"));
    host.is_empty() || authority != Some(host)
}

fn text(value: Option<&HeaderValue>) -> Option<&str> {
    value.map(|value| value.to_str().unwrap_or("invalid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.insert(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn only_names_of_this_machine_are_local() {
        for local in ["localhost", "localhost:7475", "127.0.0.1:1", "[::1]:80"] {
            assert!(has_local_host(&headers(&[("host", local)])), "{local}");
        }
        for other in [
            "evil.example",
            "evil.example:7475",
            "127.0.0.1.evil.example",
            "[::2]:80",
        ] {
            assert!(!has_local_host(&headers(&[("host", other)])), "{other}");
        }
    }

    #[test]
    fn a_page_of_another_origin_is_recognized() {
        let host = ("host", "127.0.0.1:7475");
        assert!(!is_cross_origin(&headers(&[host])));
        assert!(!is_cross_origin(&headers(&[
            host,
            ("origin", "http://127.0.0.1:7475")
        ])));
        assert!(!is_cross_origin(&headers(&[
            host,
            ("sec-fetch-site", "same-origin")
        ])));
        assert!(!is_cross_origin(&headers(&[
            host,
            ("sec-fetch-site", "none")
        ])));
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:80",
            "file://",
        ] {
            assert!(
                is_cross_origin(&headers(&[host, ("origin", origin)])),
                "{origin}"
            );
        }
        for site in ["cross-site", "same-site", "invented"] {
            assert!(
                is_cross_origin(&headers(&[host, ("sec-fetch-site", site)])),
                "{site}"
            );
        }
    }
}
