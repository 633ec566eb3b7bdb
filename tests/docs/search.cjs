// Searches a built site as its pages do: node search.cjs WORKER INDEX QUERY prints the places found, best first.
const fs = require("fs");
const vm = require("vm");
const [worker, index, query] = process.argv.slice(2);
const listeners = [];
const scope = {
  addEventListener: (kind, listener) => kind === "message" && listeners.push(listener),
  importScripts: () => { throw new Error("the search asks for another script"); },
  postMessage: ({ type, data }) => {
    if (type === 1) send({ type: 2, data: query });
    if (type === 3) {
      console.log(JSON.stringify(data.items.map((found) => found[0].location)));
      process.exit(0);
    }
  },
  console, setTimeout, clearTimeout, Promise, URL, location: { href: "http://localhost/" },
};
scope.self = scope.globalThis = scope.window = scope;
const send = (data) => setTimeout(() => listeners.forEach((listener) => listener({ data })), 0);
vm.runInContext(fs.readFileSync(worker, "utf8"), vm.createContext(scope));
const { config, docs } = JSON.parse(fs.readFileSync(index, "utf8"));
send({ type: 0, data: { config, docs, options: { suggest: false } } });
setTimeout(() => process.exit(3), 30000);
