"""What a page of HTML has."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}
LOADING = {"script", "link", "img", "iframe", "object"}


class Reader(HTMLParser):
    """A page's tags, lines of tables and text; raises if a tag is not closed in its place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.lines, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr" and "tbody" in self.open:
            self.lines.append([])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "tbody" in self.open and data.strip():
            self.lines[-1].append(data)

    def loading(self):
        """List the tags that would load something or run it."""
        return [
            (tag, attrs)
            for tag, attrs in self.tags
            if tag in LOADING
            or {"src", "srcset", "data"} & set(attrs)
            or any(attrs.get(name, "#")[0] != "#" for name in ("href", "xlink:href"))
        ]
